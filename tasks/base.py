"""The Lightning module that all tasks share: optimizer, schedule, moving average, metrics, checkpoint record."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, ClassVar, Literal, NoReturn

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.data import seed_all
from multimodal.pretrained import Checkpoint, load_weights
from multimodal.pretrained.checkpoint import KEY
from tasks.checkpoints import go_on, settle
from tasks.data import run_seed
from tasks.ema import EMA
from tasks.optim import parameter_groups, warmup_cosine
from tasks.sharding import shard

Batch = Mapping[str, Any]


class TaskModule(LightningModule):
    """AdamW or LAMB with a linear warm-up and a cosine, both by optimizer step.

    A task derives from this, names itself in `task`, and defines `build`, `loss`, `metrics_of` and `evaluate`. It has
    no constructor of its own: whatever `build` takes, down to the fields of the model's config, becomes a flag.

    Args:
        optimizer: adamw, or lamb, which scales each parameter's step by its norm (You et al. 2020), for large batches.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay of matrices; norms, biases and positions take none.
        betas: Decay rates of the optimizer's two moments.
        layer_decay: Factor on the learning rate from each layer to the one below it.
        warmup: Optimizer steps of linear warm-up; below 1, a share of the run.
        final_lr: Share of lr that is left at the end of the run.
        ema_decay: Decay of a moving average of the weights, which is then what is validated and used; None = none.
        compile: Compile the model with torch.compile.
    """

    task: ClassVar[str]

    def __init__(
        self,
        *,
        optimizer: Literal["adamw", "lamb"] = "adamw",
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        layer_decay: float = 1.0,
        warmup: float = 0.05,
        final_lr: float = 0.0,
        ema_decay: float | None = None,
        compile: bool = False,
        **model: Any,
    ) -> None:
        super().__init__()
        for name, value, right, expected in (
            ("lr", lr, lr > 0, "more than 0"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("betas", betas, all(0 <= beta < 1 for beta in betas), "rates in [0, 1)"),
            ("layer_decay", layer_decay, 0 < layer_decay <= 1, "a factor in (0, 1]"),
            ("warmup", warmup, warmup >= 0, "at least 0"),
            ("final_lr", final_lr, 0 <= final_lr <= 1, "a share in [0, 1]"),
            ("ema_decay", ema_decay, ema_decay is None or 0 < ema_decay < 1, "a rate in (0, 1)"),
        ):
            if not right:
                raise ValueError(f"{name} is {value}, expected {expected}")
        self.save_hyperparameters()
        # As plain data: a checkpoint that names a class cannot be read safely.
        self.hparams.update({name: asdict(value) for name, value in model.items() if is_dataclass(value)})  # type: ignore[arg-type]
        self.model = self.build(**model)
        self.train_metrics = MetricCollection({"loss": MeanMetric(nan_strategy="disable")}, prefix="train/")
        self.val_metrics = MetricCollection(dict(self.metrics_of()), prefix="val/", compute_groups=False)
        self.test_metrics = MetricCollection(dict(self.metrics_of()), prefix="test/", compute_groups=False)
        self._diverged: Tensor | None = None
        """The first step whose loss was not finite, or -1."""
        self._total_steps: int | None = None
        """Optimizer steps of the run."""
        self._steps_before: int | None = None
        """Optimizer steps that a resumed run had when it was saved."""

    # What a task defines

    def build(self, **model: Any) -> nn.Module:
        """The model, with its `config`; the arguments before `**model` are the task's own options."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """The training loss of a batch, a scalar."""
        raise NotImplementedError

    def metrics_of(self) -> dict[str, Metric]:
        """Fresh metrics by name, logged as `val/NAME` and `test/NAME`."""
        raise NotImplementedError

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        """Update the metrics by a batch."""
        raise NotImplementedError

    def load_pretrained(self, checkpoint: Checkpoint, where: str, labels: list[str] | None = None) -> None:
        """Start from a checkpoint's weights; ValueError that lists the keys which do not fit.

        Args:
            checkpoint: the weights, and the config that they belong to.
            where: what the checkpoint was read from, for errors.
            labels: the classes that this module is to tell apart; None = those of the checkpoint.
        """
        load_weights(self.model, checkpoint.state_dict, where)

    def lr_scale(self, name: str) -> float:
        """Factor on the learning rate of the model's parameter of that name."""
        return 1.0

    # Training and evaluation

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.hparams["compile"]:
            self.model.compile()  # in place, so that checkpoints keep the names of their keys

    def configure_model(self) -> None:
        """Divide the model among the processes, where the strategy is one that does."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_callbacks(self) -> list[Callback]:
        decay = self.hparams["ema_decay"]
        return [EMA(decay)] if decay is not None and self.trainer.state.fn == TrainerFn.FITTING else []

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        seed_all(run_seed(), self.global_rank, self.trainer.fit_loop.total_batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self._note_divergence(loss.detach())
        self.train_metrics.update(loss.detach())
        self.log("train/loss_step", loss, prog_bar=True)
        self.log("lr", max(group["lr"] for group in self.trainer.optimizers[0].param_groups))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, self.test_metrics)

    def on_validation_epoch_start(self) -> None:
        self._check_divergence()

    def on_train_epoch_end(self) -> None:
        self._check_divergence()
        if self.train_metrics["loss"].update_called:  # a run may be resumed at the very end of an epoch
            self._log(self.train_metrics)

    def _note_divergence(self, loss: Tensor) -> None:
        """Keep the first step with a loss that is not finite, on the device: to look at it makes a GPU wait."""
        step = torch.where(loss.isfinite(), -1, self.global_step)
        self._diverged = step if self._diverged is None else torch.where(self._diverged < 0, step, self._diverged)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if loss.device.type == "cpu" or self.trainer.fit_loop.batch_idx % every == 0:
            self._check_divergence()

    def _check_divergence(self) -> None:
        if self.trainer.precision == "16-mixed":
            # A loss may overflow in float16: the step is left out, and the scale of the loss halved.
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            if scaler is not None and scaler.get_scale() < 1:
                self._diverge("the loss overflows in float16 at any scale", self.global_step)
        elif self._diverged is not None and self._diverged >= 0:
            self._diverge("train/loss is not finite", int(self._diverged))

    def _diverge(self, found: str, step: int) -> NoReturn:
        rate = max(group["lr"] for group in self.trainer.optimizers[0].param_groups)
        raise ValueError(
            f"{found} at step {step}, learning rate {rate:.3g}: training has diverged; try a smaller model.lr"
        )

    def on_validation_epoch_end(self) -> None:
        self._log(self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self._log(self.test_metrics)

    def _log(self, metrics: MetricCollection) -> None:
        """Log over all processes; computed here, where a process that got no sample takes part as well."""
        for name, value in metrics.compute().items():
            # Values of single classes (val/AP/cat) would fill the line.
            shown = metrics is self.val_metrics and name.count("/") == 1
            self.log(name, value, prog_bar=shown, sync_dist=True)
        metrics.reset()

    # Optimization

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self._measure_run()
        optimizer = self._optimizer()
        schedule = LambdaLR(optimizer, warmup_cosine(steps, self.hparams["warmup"], self.hparams["final_lr"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _optimizer(self) -> Optimizer:
        groups, betas = self.optimizer_groups(), self.hparams["betas"]
        if self.hparams["optimizer"] == "lamb":
            from timm.optim.lamb import Lamb  # half a second, which other runs need not wait

            # Clipping is the trainer's, as with AdamW.
            return Lamb(groups, betas=betas, eps=1e-8, max_grad_norm=None)
        # With loss scaling a fused step unscales gradients by itself, which is too late for clipping.
        fused = not (self.trainer.precision == "16-mixed" and self.trainer.gradient_clip_val)
        return AdamW(groups, betas=betas, fused=fused)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip in bf16 as well, where Lightning refuses a fused optimizer though no loss is scaled."""
        plugin = self.trainer.precision_plugin
        if plugin.precision != "bf16-mixed" or not gradient_clip_val:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            plugin.clip_grad_by_value(optimizer, gradient_clip_val)
        else:
            plugin.clip_grad_by_norm(optimizer, gradient_clip_val)

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The parameters to train, as the optimizer takes them; ValueError where there is none."""
        names = ("lr", "weight_decay", "layer_decay")
        return parameter_groups(self.model, lr_scale=self.lr_scale, **{name: self.hparams[name] for name in names})

    def _measure_run(self) -> int:
        if self.trainer.accumulate_grad_batches < 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}, expected at least 1"
            )
        steps = self.trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            raise ValueError("the run has no end, or no step: give trainer.max_epochs or trainer.max_steps")
        batches, accumulated = self.trainer.num_training_batches, self.trainer.accumulate_grad_batches
        if accumulated > batches:
            rank_zero_warn(f"accumulate_grad_batches is {accumulated}, but an epoch has only {batches} batches")
        self._total_steps = int(steps)
        return self._total_steps

    def on_train_start(self) -> None:
        """Let the configuration count, also where a resumed optimizer and schedule brought what counted before."""
        go_on(self.trainer)
        optimizer, schedule = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        assert isinstance(schedule, LambdaLR)
        fresh, before = self.optimizer_groups(), optimizer.param_groups[0]["lr"]
        schedule.base_lrs = [group["lr"] for group in fresh]
        for group, new, factor in zip(optimizer.param_groups, fresh, schedule.lr_lambdas, strict=True):
            group["initial_lr"] = new["lr"]
            group["lr"] = new["lr"] * factor(schedule.last_epoch)
            group["weight_decay"] = new["weight_decay"]
            group["betas"] = self.hparams["betas"]
        if self._steps_before not in (None, self._total_steps):
            rank_zero_info(
                f"The run is now {self._total_steps} steps long, not {self._steps_before}: the schedule is that of the "
                f"new length, from step {self.global_step} on (learning rate {optimizer.param_groups[0]['lr']:.3g}, "
                f"before {before:.3g})."
            )

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raw = checkpoint.get("current_model_state", checkpoint["state_dict"])
        self._check_divergence()
        if not all(bool(value.isfinite().all()) for value in raw.values() if isinstance(value, Tensor)):
            self._diverge("a weight is not finite", self.global_step)
        if "loops" in checkpoint:
            settle(checkpoint["loops"]["fit_loop"], self.trainer)
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        preprocess, tokenizer = getattr(data, "preprocess", None), getattr(data, "tokenizer", None)
        checkpoint[KEY] = Checkpoint.of(
            self.task,
            self.model,
            preprocess=preprocess.to_dict() if preprocess else None,
            labels=getattr(data, "labels", None),
            tokenizer=tokenizer.to_dict() if tokenizer else None,
        ).record()
        checkpoint["total_steps"] = self._total_steps
        checkpoint["train_metrics"] = _sums(self.train_metrics)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is None or self._trainer.state.fn != TrainerFn.FITTING:
            return
        had = checkpoint.get("hyper_parameters", {}).get("optimizer", "adamw")
        if had != self.hparams["optimizer"]:
            raise ValueError(
                f"model.optimizer is {self.hparams['optimizer']}, expected {had} as in the run so far; to change it "
                "start with --init"
            )
        self._steps_before = checkpoint.get("total_steps")
        if self.global_rank == 0:  # the sums are those of all processes
            _restore_sums(self.train_metrics, checkpoint.get("train_metrics", {}))
        if self.hparams["ema_decay"] is None and "current_model_state" in checkpoint:
            rank_zero_info("model.ema_decay is null: the run goes on from the raw weights, its averages end here.")
            checkpoint["state_dict"] = checkpoint["current_model_state"]


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a value over all processes."""
    if not dist.is_initialized():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def masked_mean(losses: Tensor, counted: Tensor) -> Tensor:
    """The mean over what counts, by its number in all processes; 0 where none does."""
    return (losses * counted).sum() / mean_over_processes(counted.sum()).clamp(min=1)


def _sums(metrics: MetricCollection) -> dict[str, dict[str, Any]]:
    """What the metrics have added up so far, over all processes."""
    saved = {}
    for name, metric in metrics.items(keep_base=True):
        if metric.update_called:
            with metric.sync_context():
                saved[name] = {key: value.clone() for key, value in metric.metric_state.items()}  # type: ignore[union-attr]
    return saved


def _restore_sums(metrics: MetricCollection, saved: dict[str, dict[str, Any]]) -> None:
    for name, sums in saved.items():
        metric = metrics[name]
        for key, value in sums.items():
            setattr(metric, key, value.to(metric.device))
        metric._update_count = 1
