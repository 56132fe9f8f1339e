"""What the benchmarks of the Decision Transformer share: a run, and roll-outs of it, through the command line."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CLONES: Mapping[str, Mapping[str, str]] = {
    "behaviour cloning (BC)": {"model.returns": "false"},
    "10%BC": {"model.returns": "false", "data.top": "0.1"},
}
"""Flags that make a recipe behaviour cloning by the same stack."""


class Returns(NamedTuple):
    """What was achieved for each target."""

    means: list[float]
    deviations: list[float]
    episodes: list[list[float]]


def train(recipe: str, folder: Path, flags: Mapping[str, str]) -> tuple[Path, float]:
    """The run's folder, and the seconds of the whole command."""
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    command = [sys.executable, "-m", "tasks.cli", "fit", "dt", "--config", str(ROOT / "configs" / recipe), *arguments]
    start = time.perf_counter()
    subprocess.run([*command, "--trainer.default_root_dir", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return next((folder / "dt").iterdir()), time.perf_counter() - start


def roll_out(run: Path, targets: Sequence[float]) -> Returns:
    """Twenty episodes for each target, or, for a run that clones behaviour, without any."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rollout.json")
        asked = ["--target-return", *map(str, targets)] if targets else []
        command = [sys.executable, "-m", "tasks.cli", "rollout", "dt", "--checkpoint", str(run), *asked]
        subprocess.run([*command, "--episodes", "20", "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        results = json.loads(out.read_text())["results"]
    return Returns(*([result[name] for result in results] for name in ("mean", "std", "returns")))
