"""What the benchmarks of the Decision Transformer share: roll-outs of a run, through the command line."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


def roll_out(run: Path, targets: Sequence[float]) -> Returns:
    """Twenty episodes for each target, or, for a run that clones behaviour, without any."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rollout.json")
        asked = ["--target-return", *map(str, targets)] if targets else []
        command = [sys.executable, "-m", "tasks.cli", "rollout", "dt", "--checkpoint", str(run), *asked]
        subprocess.run([*command, "--episodes", "20", "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        results = json.loads(out.read_text())["results"]
    return Returns(*([result[name] for result in results] for name in ("mean", "std", "returns")))
