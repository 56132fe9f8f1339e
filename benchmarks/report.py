"""Where the figures go: sections of docs/results.md, each with its command, date, versions and machine."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
_HEAD = (
    "# Results\n\nEach section is written by the command that it names; `make results` runs those that need no "
    "data from elsewhere.\n"
)


def processor(device: torch.device | None = None) -> str:
    """The device's name and, for a CPU, what torch makes of it."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    extensions = sorted(set(re.findall(r"\bamx_\w+|\bavx512_bf16", "\n".join(lines[:30]))))
    return f"{name} ({', '.join([torch.backends.cpu.get_cpu_capability(), *extensions])}), {os.cpu_count()} cores"


def origin(*packages: str, device: torch.device | None = None) -> str:
    """The command, the date, the versions of torch and of `packages`, and the machine."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shlex.quote, sys.argv[1:])])
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", *packages))
    machine = f"{processor(device)}, load {os.getloadavg()[0]:.1f} at the start"
    return f"`{command}`, {date.today()}, {versions}, Python {platform.python_version()}; {machine}."


def write_section(title: str, lines: Sequence[str]) -> None:
    """Put a section into docs/results.md, in place of an older one with this title."""
    path = DOCS / "results.md"
    text = path.read_text() if path.exists() else _HEAD
    head, *sections = re.split(r"(?m)^(?=## )", text)
    section = "\n".join([f"## {title}", "", *lines, ""])
    kept = [old.rstrip() + "\n" for old in sections if not old.startswith(f"## {title}\n")]
    path.write_text("\n".join([head.rstrip() + "\n", *sorted([*kept, section])]))
    print(section)
