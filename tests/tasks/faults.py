"""What can end one process of a run."""

import os
import signal
import time
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer


class Fault(Callback):
    """Ends process `rank`, by `raise` or `kill`, in the second batch of an epoch's training or validation."""

    def __init__(self, how: str, rank: int, validating: bool = False) -> None:
        self.how = how
        self.rank = rank
        self.validating = validating

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.validating and batch_idx == 1:
            self._happen(trainer)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.validating and batch_idx == 1:
            self._happen(trainer)

    def _happen(self, trainer: Trainer) -> None:
        if trainer.global_rank != self.rank:
            time.sleep(120 if self.validating else 0)  # away from what the processes exchange
            return
        if self.how == "raise":
            raise ValueError("sample 7 is broken")
        os.kill(os.getpid(), signal.SIGKILL)
