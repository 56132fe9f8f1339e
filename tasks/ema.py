"""An exponential moving average of the weights, through Lightning's callback."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.trainer.states import TrainerFn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA(WeightAveraging):
    """Lightning's weight averaging after each optimizer step, right also for what is saved while it validates.

    A checkpoint holds the averaged weights as `state_dict` and the raw ones, from which training goes on, as
    `current_model_state`. Lightning exchanges the two in place for a validation, and would save them exchanged where
    one is interrupted. Outside `fit` there is nothing to average: the `state_dict` of a checkpoint is what counts.

    It averages by interpolation, which leaves a frozen weight bit for bit as it is; the sum of products in Lightning's
    EMAWeightAveraging does not.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(decay))
        self._exchanged = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.precision in ("16-true", "bf16-true"):
            raise ValueError(
                f"ema_decay with trainer.precision {trainer.precision}: its steps are too small for 16 bits, "
                "expected a mixed precision, or ema_decay null"
            )
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The model has been converted since its copy was made.
        assert self._average_model is not None
        trainer.precision_plugin.convert_module(self._average_model)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_start(trainer, pl_module)
            self._exchanged = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)
            self._exchanged = False

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._exchanged:
            raw, averaged = checkpoint["state_dict"], checkpoint["current_model_state"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = averaged, raw

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
