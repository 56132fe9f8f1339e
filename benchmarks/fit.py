"""A run of training through the command line."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def train(task: str, folder: Path, flags: Mapping[str, str], *, recipe: str | None = None) -> tuple[Path, float]:
    """The run's folder, and the seconds of the whole command.

    Args:
        task: which one.
        folder: where the run's folder is made.
        flags: without their dashes.
        recipe: name of a file of configs/; None = the default one.
    """
    config = {} if recipe is None else {"config": str(CONFIGS / recipe)}
    told = {**config, **flags, "trainer.default_root_dir": str(folder)}
    arguments = [text for name, value in told.items() for text in (f"--{name}", value)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "tasks.cli", "fit", task, *arguments], check=True, stdout=subprocess.DEVNULL)
    return next((folder / task).iterdir()), time.perf_counter() - start
