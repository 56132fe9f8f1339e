"""A run's folder: where it is, what is written into it, and how a run is found again.

runs/<task>/<run>/: config.yaml, checkpoints/best.ckpt and last.ckpt, metrics.csv, TensorBoard events, curves.png,
summary.json.
"""

import csv
import itertools
import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor

from multimodal.pretrained.files import write_whole
from tasks.errors import one_line

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.csv"
SUMMARY = "summary.json"

_SHARED = "MULTIMODAL_RUN"


def create_run(root: Path, task: str) -> Path:
    """A new folder for a run, its own also where two runs start in the same second; ValueError where none can be made.

    The first process makes it and leaves its name to those that it starts. A process started otherwise (torchrun)
    writes nothing, and hears from Lightning where the first one's checkpoints are.
    """
    folder = root / task
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return Path(os.environ.get(_SHARED, folder / "unknown"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"trainer.default_root_dir {root}: no folder can be made there ({error})") from error
    started = f"{datetime.now():%Y%m%d-%H%M%S}"
    for name in itertools.chain([started], (f"{started}-{count}" for count in itertools.count(1))):
        try:
            (folder / name).mkdir()
        except FileExistsError:
            continue
        os.environ[_SHARED] = str(folder / name)
        return folder / name
    raise AssertionError("count never ends")


def find_run(source: str) -> Path | None:
    """The run that a path means: the folder itself, or the one whose checkpoint it is."""
    path = Path(source).expanduser()
    folder = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return folder if (folder / CONFIG).is_file() else None


def resume_point(source: str) -> tuple[Path, Path]:
    """(run folder, checkpoint) to go on from; ValueError where there is none."""
    run = find_run(source)
    if run is None:
        raise ValueError(f"--resume {source}: no run there, expected a folder with {CONFIG}, or a checkpoint in one")
    given = Path(source).expanduser()
    checkpoint = given if given.is_file() else run / CHECKPOINTS / "last.ckpt"
    if not checkpoint.is_file():
        raise ValueError(f"--resume {source}: the run has not saved {CHECKPOINTS}/last.ckpt yet")
    return run, checkpoint


def best_checkpoint(run: Path) -> Path | None:
    """best.ckpt; last.ckpt where nothing was validated; None where nothing was saved."""
    candidates = (run / CHECKPOINTS / name for name in ("best.ckpt", "last.ckpt"))
    return next((path for path in candidates if path.is_file()), None)


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all: Lightning's copy from a temporary folder may stop half-way."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = BytesIO()
        torch.save(checkpoint, content)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), content.getbuffer())


class RunCheckpoint(ModelCheckpoint):
    """A checkpoint of a run folder, which may have been moved since.

    An interruption (Ctrl-C, SIGTERM) saves one; an error does not, so that the last good one is left as it is. Of
    equally good ones the latest is kept: on a small validation set many are.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with suppress(NotImplementedError):  # a strategy with files of its own
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = WholeCheckpoints()
        super().setup(trainer, pl_module, stage)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        equal = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return equal or super().check_monitor_top_k(trainer, current)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            super().on_exception(trainer, pl_module, exception)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        def moved(path: str) -> str:
            return os.path.join(str(self.dirpath), os.path.basename(path)) if path else path

        paths = {
            name: moved(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        best = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": best, "dirpath": self.dirpath})


def checkpoint_callbacks(run: Path, monitor: str, mode: str) -> list[ModelCheckpoint]:
    """What saves best.ckpt, by the monitored metric, and last.ckpt, after each epoch and when interrupted."""
    options: dict[str, Any] = {"dirpath": run / CHECKPOINTS, "enable_version_counter": False}
    return [
        RunCheckpoint(filename="best", monitor=monitor, mode=mode, **options),
        RunCheckpoint(filename="last", save_on_exception=True, **options),
    ]


class WriteConfig(Callback):
    """Writes config.yaml when training starts: a run that cannot go on as it was told to keeps the one it has.

    Loggers, which hear of the model's options from Lightning, are told the seed, the data and where the run is; only
    the last where a run goes on, since MLflow refuses a value that differs from an earlier one.
    """

    def __init__(self, run: Path, config: str) -> None:
        self.run = run
        self.config = config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            write_whole(self.run / CONFIG, self.config.encode())
        told = {"run": str(self.run)}
        if trainer.ckpt_path is None:
            config = yaml.safe_load(self.config)
            told |= {name: config[name] for name in ("seed_everything", "data")}
        for logger in trainer.loggers:
            logger.log_hyperparams(told)


class StopTogether(Callback):
    """Ends all processes of a run at the same batch after Ctrl-C or SIGTERM, which find each of them somewhere else.

    Lightning would tell the others from within its signal handler, in the middle of whatever they exchange, and they
    may then wait for each other for ever.
    """

    def __init__(self) -> None:
        self.signal = 0
        """The signal that this process got."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._note)  # Lightning puts back what was there

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.world_size > 1 and trainer.strategy.reduce_boolean_decision(self.signal != 0, all=False):
            raise SIGTERMException

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once


def loggers(run: Path, chosen: Any, resumed_step: int | None = None) -> list[Logger]:
    """metrics.csv, with the rows before the step at which a run is resumed, and TensorBoard events.

    `chosen`, the value of --trainer.logger, takes TensorBoard's place; false means no logger at all.
    """
    if chosen is False:
        return []
    place: dict[str, Any] = {"save_dir": run.parent, "name": "", "version": run.name}
    if chosen is None or chosen is True:
        chosen = TensorBoardLogger(**place)
    rows = _rows(run)  # before the logger starts a new file
    table = CSVLogger(**place)
    if resumed_step is not None:
        for row in rows:
            if int(step := row.pop("step")) < resumed_step:
                table.log_metrics(row, step=int(step))  # type: ignore[arg-type]
        table.save()
    return [table, *(chosen if isinstance(chosen, list) else [chosen])]


def read_config(run: Path) -> dict[str, Any]:
    """config.yaml; ValueError where it is damaged."""
    try:
        config = yaml.safe_load((run / CONFIG).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{run / CONFIG}: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{run / CONFIG}: expected groups of options")
    return config


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, each with the values that it has."""
    return [{name: float(value) for name, value in row.items()} for row in _rows(run)]


def _rows(run: Path) -> list[dict[str, str]]:
    """The cells that are not empty; ValueError where one is no number, or a row has no step."""
    path = run / METRICS
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    for number, row in enumerate(rows, start=1):
        try:
            int(row["step"]), [float(value) for value in row.values()]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: row {number} is damaged, expected numbers, with a step") from error
    return rows


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """summary.json."""
    (run / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
