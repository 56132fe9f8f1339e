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

PLAIN = {
    "clip": [
        *("--model.lock_text", "false", "--data.num_workers", "0"),
        *QUIET,
        *("--model.embed_dim", "16", "--model.vision.image_size", "32"),
        *(flag for part in ("vision", "text") for flag in (f"--model.{part}.depth", "1")),
        *(flag for part in ("vision", "text") for flag in (f"--model.{part}.embed_dim", "16")),
        *(flag for part in ("vision", "text") for flag in (f"--model.{part}.num_heads", "2")),
        *("--data.num_scenes", "48", "--data.batch_size", "8"),
        *("--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "2", "--trainer.log_every_n_steps", "2"),
    ],
    "vit": SMALL,
    "detr": [
        *QUIET,
        *("--model.num_queries", "5", "--model.denoising", "0", "--data.num_scenes", "48"),
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.depth", "1")),
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.embed_dim", "16")),
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.num_heads", "2")),
        *("--data.shortest_edge", "32", "--data.longest_edge", "32", "--data.batch_size", "8"),
        *("--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "2", "--trainer.log_every_n_steps", "2"),
    ],
    "dt": [
        *SMALL,
        *("--data.num_episodes", "7", "--model.context_length", "3", "--model.episodes", "2"),
        *("--trainer.val_check_interval", "1.0", "--model.dropout", "0.0", "--model.embed_dropout", "0.0"),
        *("--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "2"),
    ],
    "whisper": [
        *QUIET,
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.depth", "1")),
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.embed_dim", "16")),
        *(flag for part in ("encoder", "decoder") for flag in (f"--model.{part}.num_heads", "2")),
        *("--data.num_messages", "48", "--data.batch_size", "8", "--data.num_workers", "0"),
        *("--trainer.limit_val_batches", "2", "--trainer.limit_test_batches", "2", "--trainer.log_every_n_steps", "2"),
    ],
}
"""For each task of the registry, flags of a run on its embedded data that takes a second: 6 steps an epoch."""
DROPOUT = {
    "clip": ["--model.text.dropout", "0.5"],
    "vit": ["--model.dropout", "0.5"],
    "detr": ["--model.encoder.dropout", "0.5"],
    "dt": ["--model.dropout", "0.5"],
    "whisper": ["--model.encoder.dropout", "0.5"],
}
"""Flags that have a model leave out units at random."""
TINY = {
    "clip": [
        *PLAIN["clip"],
        *("--model.vision.drop_path", "[0.1]", "--model.text.dropout", "0.1", "--model.micro_batch", "3"),
    ],
    "vit": [
        *PLAIN["vit"],
        *("--model.mixup", "0.8", "--model.cutmix", "1.0", "--data.repeated_augmentation", "2"),
        *("--model.drop_path", "0.1"),
    ],
    "detr": [*PLAIN["detr"], "--model.denoising", "10", "--model.encoder.drop_path", "0.1"],
    "dt": [*PLAIN["dt"], "--model.drop_path", "0.1", "--model.embed_dropout", "0.1"],
    "whisper": [
        *PLAIN["whisper"],
        *("--model.encoder.dropout", "0.1", "--model.decoder.attention_dropout", "0.1"),
        *("--data.augment.time_masks", "2", "--data.augment.channel_masks", "1", "--data.augment.speed", "0.1"),
    ],
}
"""The same, with random numbers in the data, the loss and the model."""
