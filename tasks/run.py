"""A run's folder: where it is, what is written into it, and how a run is found again.

runs/<task>/<run>/: config.yaml, checkpoints/ (best.ckpt, last.ckpt, previous.ckpt), metrics.csv, TensorBoard events,
curves.png, summary.json.
"""

import csv
import itertools
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only, rank_zero_warn

from multimodal.pretrained.checkpoint import BEST, CHECKPOINTS, LAST, PREVIOUS
from multimodal.pretrained.files import check_torch, write_whole
from tasks.errors import one_line

CONFIG = "config.yaml"
METRICS = "metrics.csv"
SUMMARY = "summary.json"
LOCK = ".lock"
PATIENCE = 10.0
"""Seconds to wait for a lock: so long the workers of a run that was killed may keep it."""

_SHARED = "MULTIMODAL_RUN"


def is_first_process() -> bool:
    """Whether this process writes the run's files, as far as its environment tells before Lightning has started."""
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]


def create_run(root: Path, task: str) -> Path:
    """A new folder for a run, its own also where two runs start in the same second; ValueError where none can be made.

    The first process makes it and leaves its name to those that it starts. A process started otherwise (torchrun)
    writes nothing, and hears from Lightning where the first one's checkpoints are.
    """
    folder = root / task
    if not is_first_process():
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
    """(run folder, checkpoint) to go on from: the last that is not damaged; ValueError where there is none."""
    run = find_run(source)
    if run is None:
        raise ValueError(f"--resume {source}: no run there, expected a folder with {CONFIG}, or a checkpoint in one")
    given = Path(source).expanduser()
    candidates = [given] if given.is_file() else [run / CHECKPOINTS / name for name in (LAST, PREVIOUS, BEST)]
    damages = []
    for checkpoint in filter(Path.is_file, candidates):
        try:
            check_torch(checkpoint)
        except ValueError as error:
            damages.append(str(error))
            continue
        if damages:
            rank_zero_warn(f"{'; '.join(damages)}; the run goes on from {checkpoint.name}")
        return run, checkpoint
    raise ValueError("; ".join(damages) or f"--resume {source}: the run has not saved {CHECKPOINTS}/{LAST} yet")


def lock_run(run: Path) -> FileLock:
    """Keep other processes from training in a run until the lock is released; ValueError where one does so now."""
    lock = FileLock(run / LOCK, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{run}: another process is training in this run; each needs one of its own") from None
    return lock


class WriteConfig(Callback):
    """Writes config.yaml when training starts: a run that cannot go on as it was told to keeps the one it has."""

    def __init__(self, run: Path, config: str) -> None:
        self.run = run
        self.config = config

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            write_whole(self.run / CONFIG, self.config.encode())


def loggers(run: Path, chosen: Any, resumed_step: int | None = None) -> list[Logger]:
    """metrics.csv, with the rows before the step at which a run is resumed, and TensorBoard events.

    `chosen`, the value of --trainer.logger, takes TensorBoard's place; false means no logger at all.
    """
    if chosen is False:
        return []
    place: dict[str, Any] = {"save_dir": run.parent, "name": "", "version": run.name}
    if chosen is None or chosen is True:
        chosen = TensorBoardLogger(**place, purge_step=resumed_step)
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
    """The cells that are not empty; ValueError where one is no number, or a row has no step.

    The last row may be torn: a run that is killed may be writing it.
    """
    path = run / METRICS
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    damaged = [number for number, row in enumerate(rows, start=1) if not _is_whole(row)]
    if damaged and damaged[0] < len(rows):
        raise ValueError(f"{path}: row {damaged[0]} is damaged, expected numbers, with a step")
    return rows[: len(rows) - len(damaged)]


def _is_whole(row: dict[str, str]) -> bool:
    try:
        int(row["step"]), [float(value) for value in row.values()]
    except (KeyError, TypeError, ValueError):
        return False
    return True


def write_summary(run: Path, summary: Mapping[str, Any]) -> None:
    """summary.json."""
    (run / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
