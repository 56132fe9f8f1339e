"""A run's folder: where it is, what is written into it, and how a run is found again.

runs/<task>/<run>/: config.yaml, checkpoints/ (best.ckpt, last.ckpt, previous.ckpt), metrics.csv, TensorBoard events
and their hparams.yaml, curves.png, summary.json, and .lock, which a process holds while it trains there.
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
    """The run that a path means: the folder itself, its folder of checkpoints, or one of these."""
    path = Path(source).expanduser()
    place = path.absolute()
    if place.name == CHECKPOINTS:
        path = place.parent
    elif place.parent.name == CHECKPOINTS:
        path = path.parent.parent if path.parent.name == CHECKPOINTS else place.parent.parent
    return path if (path / CONFIG).is_file() else None


def run_to_resume(source: str) -> Path:
    """The run to go on with; ValueError where there is none."""
    run = find_run(source)
    if run is None:
        raise ValueError(f"--resume {source}: no run there, expected a folder with {CONFIG}, or a checkpoint in one")
    return run


def resume_point(run: Path, source: str) -> Path:
    """The checkpoint to go on from: the one that is named, or the last that is not damaged, others being set aside.

    ValueError where there is none.
    """
    given = Path(source).expanduser()
    if given.is_file():
        check_torch(given)
        return given
    if not given.is_dir():
        there = ", ".join(sorted(path.name for path in (run / CHECKPOINTS).glob("*.ckpt"))) or "none"
        raise ValueError(f"--resume {source}: no such checkpoint, there are {there}")
    damages = []
    for checkpoint in (run / CHECKPOINTS / name for name in (LAST, PREVIOUS, BEST)):
        if not checkpoint.is_file():
            continue
        try:
            check_torch(checkpoint)
        except ValueError as error:
            damages.append((checkpoint, str(error)))
            continue
        if damages:
            rank_zero_warn(f"{'; '.join(text for _, text in damages)}; the run goes on from {checkpoint.name}")
        if is_first_process():
            for damaged, _ in damages:  # or the next save would put it in the place of the one before
                damaged.replace(damaged.with_name(f"{damaged.name}.damaged"))
        return checkpoint
    told = "; ".join(text for _, text in damages)
    raise ValueError(told or f"--resume {source}: the run has not saved {CHECKPOINTS}/{LAST} yet")


def lock_run(run: Path) -> FileLock:
    """Keep other processes from training in a run until the lock is released; ValueError where one does so now."""
    lock = FileLock(run / LOCK, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{run}: another process is training in this run; each needs one of its own") from None
    for part in (run / CHECKPOINTS).glob(".*.part"):  # what a killed process was writing
        part.unlink()
    return lock


class BeginRun(Callback):
    """Writes config.yaml and cuts metrics.csv when training starts: a run that cannot go on as told keeps both.

    Loggers, which hear of the model's options from Lightning, are told the seed, the data and where the run is; only
    the last where a run goes on, since MLflow refuses a value that differs from an earlier one.

    Args:
        run: the run's folder.
        config: what config.yaml is to hold.
        rows: rows of metrics.csv to keep; None = all.
    """

    def __init__(self, run: Path, config: str, rows: int | None) -> None:
        self.run = run
        self.config = config
        self.rows = rows
        self.done = False
        """Whether training has started."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            write_whole(self.run / CONFIG, self.config.encode())
            cut_rows(self.run, self.rows)
        self.done = True
        told = {"run": str(self.run)}
        if trainer.ckpt_path is None:
            config = yaml.safe_load(self.config)
            told |= {name: config[name] for name in ("seed_everything", "data")}
        for logger in trainer.loggers:
            logger.log_hyperparams(told)


def loggers(run: Path, chosen: Any) -> list[Logger]:
    """metrics.csv, with the rows that it has, and TensorBoard events.

    `chosen`, the value of --trainer.logger, takes TensorBoard's place; false means no logger at all.
    """
    if chosen is False:
        return []
    place: dict[str, Any] = {"save_dir": run.parent, "name": "", "version": run.name}
    rows = _rows(run)  # before the logger starts a new file
    table = CSVLogger(**place)
    for row in rows:
        table.log_metrics(row, step=int(row.pop("step")))  # type: ignore[arg-type]
    if rows:
        table.save()
    if chosen is None or chosen is True:
        chosen = TensorBoardLogger(**place)
    return [table, *(chosen if isinstance(chosen, list) else [chosen])]


def count_rows(run: Path) -> int:
    """Rows of metrics.csv."""
    return max(0, len(_lines(run)) - 1)


def cut_rows(run: Path, rows: int | None) -> None:
    """Keep the first rows of metrics.csv; None = all."""
    if rows is not None and (lines := _lines(run)):
        write_whole(run / METRICS, "".join(lines[: rows + 1]).encode())


def _lines(run: Path) -> list[str]:
    path = run / METRICS
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


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
    write_whole(run / SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())
