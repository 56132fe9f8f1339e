"""When a run is saved, and in which form: so that it goes on from there as if nothing had happened."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning_fabric.utilities.types import _PATH
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.plugins import TorchCheckpointIO
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch import Tensor

from multimodal.pretrained.checkpoint import BEST, CHECKPOINTS, LAST, PREVIOUS
from multimodal.pretrained.files import whole_file
from tasks.run import count_rows, is_first_process

_SAVE, _STOP = 1, 2


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all, and keeps the last one but one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(place, keep=place.with_name(PREVIOUS) if place.name == LAST else None) as file:
            torch.save(checkpoint, file)


class BestCheckpoint(ModelCheckpoint):
    """best.ckpt, by the monitored metric, in a run folder that may have been moved since.

    Of equally good ones the latest is kept: on a small validation set many are. None is kept where the metric has
    nothing to be measured by, as AP in images without objects.
    """

    def __init__(self, run: Path, monitor: str, mode: str) -> None:
        super().__init__(
            dirpath=run / CHECKPOINTS,
            filename=Path(BEST).stem,
            monitor=monitor,
            mode=mode,
            enable_version_counter=False,
            # At the end of an epoch that max_steps cut short the metric would be that of the epoch before.
            save_on_train_epoch_end=False,
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)
        elif not trainer.sanity_checking:
            rank_zero_warn(f"{self.monitor} is n/a on the validation data: the run keeps last.ckpt alone")

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        equal = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return equal or super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        def moved(path: str) -> str:
            return os.path.join(str(self.dirpath), os.path.basename(path)) if path else path

        paths = {
            name: moved(state_dict[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")
        }
        best = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **paths, "best_k_models": best, "dirpath": self.dirpath})


class LastCheckpoint(Callback):
    """last.ckpt: after each epoch, every so many optimizer steps or minutes, and when Ctrl-C or SIGTERM ends the run.

    Signals are noted, and acted upon between two optimizer steps, or two batches of a validation; a second one ends the
    process at once. Several processes agree before each batch: a signal finds each of them somewhere else, and one that
    stopped alone would leave the others waiting for it.

    Args:
        run: the run's folder; None = save nothing.
        every_n_steps: optimizer steps from one save to the next; None = no such saves.
        every_n_minutes: minutes from one save to the next; None = no such saves.
    """

    def __init__(self, run: Path | None, every_n_steps: int | None, every_n_minutes: float | None) -> None:
        self.path = run and run / CHECKPOINTS / LAST
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.signal = 0
        """The signal that this process got."""
        self._saved = (0, 0, False)
        """Where the last save was: optimizer steps and epochs that were done, and whether it was in a validation."""
        self._saved_at = self._started = time.monotonic()
        self._seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Time since the training started, without that between an interruption and going on."""
        return self._seconds_before + time.monotonic() - self._started

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_before = state_dict["seconds"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """How many rows of metrics.csv belong to what is done: a resumed run logs the later ones again."""
        if self.path is None or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.save()
        checkpoint["rows"] = count_rows(self.path.parents[1])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with suppress(NotImplementedError):  # a strategy with files of its own
            if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
                trainer.strategy.checkpoint_io = WholeCheckpoints()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved = _place(trainer)
        self._saved_at = self._started = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._note)  # Lightning puts back what was there

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)  # of the epoch before, with all that was logged at its end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:  # else gradients would be lost
            self._attend(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        # Several processes may have unequally many batches, and could not agree.
        if fitting and trainer.world_size == 1 and _has_stepped(trainer, trainer.fit_loop.epoch_loop.batch_progress):
            self._attend(trainer)

    def _attend(self, trainer: Trainer) -> None:
        wanted = _STOP if self.signal else _SAVE if self._due(trainer) else 0
        if trainer.world_size > 1:
            asked = torch.tensor(wanted, device=trainer.strategy.root_device)
            wanted = int(trainer.strategy.reduce(asked, reduce_op="max"))
        if wanted:
            self._save(trainer)
        if wanted == _STOP:
            raise SIGTERMException

    def _due(self, trainer: Trainer) -> bool:
        if self.every_n_steps and trainer.global_step - self._saved[0] >= self.every_n_steps:
            return True
        return self.every_n_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_n_minutes

    def _save(self, trainer: Trainer) -> None:
        place = _place(trainer)
        if self.path is not None and place != self._saved:
            trainer.save_checkpoint(self.path)
            self._saved, self._saved_at = place, time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)
        if is_first_process():
            # Not print, which may be what was interrupted.
            os.write(2, b"\nmultimodal: stopping after this step; once more stops at once\n")


def settle(progress: dict[str, Any], trainer: Trainer) -> None:
    """Bring the progress of a checkpoint that is about to be saved into a form that Lightning resumes exactly.

    Lightning loses the validation that was due behind a batch, or counts a batch that it has only fetched, depending
    on the hook in which a checkpoint is taken. Here it is always one of two: between epochs; or k batches of an epoch
    are done, with or without the validation behind them, and what comes next is still to do.

    Args:
        progress: `checkpoint["loops"]["fit_loop"]`, changed in place.
        trainer: the trainer that it was taken of.
    """
    epochs, batches = progress["epoch_progress"], progress["epoch_loop.batch_progress"]
    between_epochs = epochs["current"]["started"] == epochs["current"]["processed"]
    ended_batch = batches["current"]["completed"] < batches["current"]["processed"]
    counted = batches["current"]["ready"] > batches["current"]["processed"]  # the next batch is there already
    _complete(batches)
    if between_epochs:
        _complete(epochs)
        if batches["current"]["processed"] and not batches["is_last_batch"]:
            # By max_steps or max_time: Lightning takes it for a whole epoch.
            for part in ("total", "current"):
                epochs[part] |= {name: epochs[part][name] - 1 for name in ("processed", "completed")}
            between_epochs, counted = False, True
        else:
            batches["current"] = dict.fromkeys(batches["current"], 0)
    done = batches["current"]["processed"]
    batches["is_last_batch"] = done == trainer.num_training_batches
    for loader in progress["state_dict"].get("combined_loader", []):
        loader |= {"epoch": epochs["current"]["processed"], "batches": done}
    if between_epochs:
        return
    due = _validation_is_due(trainer, batches)
    validation = progress["epoch_loop.val_loop.batch_progress"]
    if (ended_batch and due) or (trainer.validating and not _is_over(validation)):
        for part in ("total", "current"):
            validation[part] = {"ready": 1, "started": 1, "processed": 0, "completed": 0}  # begun, so to be done again
    if not counted and (done % trainer.accumulate_grad_batches == 0 or batches["is_last_batch"]):
        progress["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def go_on(trainer: Trainer) -> None:
    """Put right, when training starts, what Lightning makes of a settled checkpoint."""
    fit = trainer.fit_loop
    # It leaves this out between epochs, and where the length of the run was asked for before the checkpoint was read.
    if fit._combined_loader is not None and fit._combined_loader_states_to_load:
        fit._combined_loader._load_state_dicts(fit._combined_loader_states_to_load)
        fit._combined_loader_states_to_load = []
    # With max_steps it takes the end of an epoch for the middle of one.
    loop = fit.epoch_loop
    if loop.batch_progress.current.ready == 0:
        loop.restarting = False
    # Behind a batch at which validation is due it counts that batch's step for its loggers once more.
    if loop.restarting and not loop._should_accumulate() and loop._should_check_val_fx(fit._data_fetcher):  # type: ignore[arg-type]
        loop._batches_that_stepped -= 1


class WholeFitLoop(_FitLoop):
    """Lightning's loop, but a run that was stopped in the validation behind its last step ends that first.

    With max_steps Lightning takes such a run for one that is done.
    """

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """In place of the loop that the trainer has, before it has run."""
        before = trainer.fit_loop
        trainer.fit_loop = cls(trainer, before.min_epochs, before.max_epochs)
        trainer.fit_loop.epoch_loop = before.epoch_loop

    @property
    def done(self) -> bool:
        return not self._is_validation_left and super().done

    @property
    def _is_validation_left(self) -> bool:
        current = self.epoch_loop.val_loop.batch_progress.current
        begun = self.restarting and current.completed < current.ready
        return begun and self.epoch_loop._should_check_val_fx(self._data_fetcher)  # type: ignore[arg-type]


def _place(trainer: Trainer) -> tuple[int, int, bool]:
    return trainer.global_step, trainer.current_epoch, trainer.validating


def _has_stepped(trainer: Trainer, batches: Any) -> bool:
    """Whether no gradient is waiting for the batches that come."""
    return batches.is_last_batch or batches.current.ready % trainer.accumulate_grad_batches == 0


def _complete(progress: dict[str, Any]) -> None:
    for part in ("total", "current"):
        progress[part] = dict.fromkeys(progress[part], progress[part]["processed"])


def _is_over(validation: dict[str, Any]) -> bool:
    return validation["is_last_batch"] and validation["current"]["ready"] == validation["current"]["completed"]


def _validation_is_due(trainer: Trainer, batches: dict[str, Any]) -> bool:
    """What Lightning will decide when it has resumed behind these batches."""
    loop = trainer.fit_loop.epoch_loop
    live, loop.batch_progress = loop.batch_progress, type(loop.batch_progress)()
    try:
        loop.batch_progress.load_state_dict(batches)
        return loop._should_check_val_fx(trainer.fit_loop._data_fetcher)  # type: ignore[arg-type]
    finally:
        loop.batch_progress = live
