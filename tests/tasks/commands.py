"""What tests of the command line share."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
"""Where `python -m tasks.cli` finds the packages."""

QUIET = ["--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"]
SMALL = [
    *QUIET,
    *("--model.depth", "2", "--model.embed_dim", "16", "--model.num_heads", "2"),
    *("--data.batch_size", "256", "--trainer.log_every_n_steps", "2"),
]
"""Flags of a run on the digits that takes a second: 6 steps an epoch."""
TWO = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
"""Flags of a run in two processes; the strategy is to be added."""


class Result(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that tells what is wrong."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("multimodal: error: ")]
        assert "Traceback" not in self.err
        return line.removeprefix("multimodal: error: ")


Run = Callable[..., Result]

TINY = {"vit": [*SMALL, "--model.mixup", "0.8", "--model.cutmix", "1.0", "--data.repeated_augmentation", "2"]}
"""For each task of the registry, flags of a run on its embedded data that takes a second and draws random numbers."""
