"""The machine that a benchmark ran on, and how fast it is by its own measure."""

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.errors import one_line
from tasks.timing import Stopwatch

PRECISIONS = {"32": torch.float32, "bf16": torch.bfloat16}
"""By what is typed."""
_REPEATS = 5


@dataclass(frozen=True)
class Machine:
    """What figures depend on beside the code."""

    name: str
    """Of the device, and for a CPU what torch makes of it."""
    device: str
    system: str
    python: str
    torch: str
    cores: int
    threads: int
    load: float
    """Of the minute before the benchmark began."""
    matmul: dict[str, float]
    """Most floating-point operations a second of a large square product, by precision."""
    bandwidth: float
    """Most bytes a second that are read, or read and written, of a tensor that fits no cache."""


def describe(device: torch.device, precisions: Sequence[str]) -> Machine:
    """The machine; measures it for a few seconds."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Machine(
        name=processor(device),
        device=str(device),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load=round(load, 2),
        matmul={name: matmul_peak(device, PRECISIONS[name]) for name in precisions},
        bandwidth=bandwidth(device),
    )


def refused(device: torch.device, precisions: Sequence[str]) -> dict[str, str]:
    """Those that the device does not compute in, and why."""
    found = {}
    for name in precisions:
        try:
            one = torch.ones(64, 64, device=device, dtype=PRECISIONS[name])
            (one @ one).sum().item()  # waits for the device
        except (RuntimeError, TypeError) as error:
            found[name] = one_line(error)
    return found


def processor(device: torch.device) -> str:
    """The name of a device and, for a CPU, what torch makes of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    extensions = sorted(set(re.findall(r"\bamx_\w+|\bavx512_bf16", "\n".join(lines[:30]))))
    capability = ", ".join([torch.backends.cpu.get_cpu_capability(), *extensions])
    return f"{models[0] if models else platform.processor() or 'CPU'} ({capability})"


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the fastest of several products of square matrices."""
    sizes = (4096, 8192) if device.type == "cuda" else (1024, 2048)
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        best = max(best, 2 * size**3 / _fastest(device, lambda: torch.mm(a, b, out=out)))  # noqa: B023
    return best


def bandwidth(device: torch.device) -> float:
    """Bytes a second of the faster of adding up and copying 256 MiB."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    return max(size / _fastest(device, source.sum), 2 * size / _fastest(device, lambda: target.copy_(source)))


def _fastest(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the fastest call, after one that warms up."""
    run()
    seconds = float("inf")
    for _ in range(_REPEATS):
        watch = Stopwatch(device)
        watch.mark()
        run()
        watch.mark()
        seconds = min(seconds, watch.laps()[0] / 1000)
    return max(seconds, time.get_clock_info("perf_counter").resolution)
