"""The Lightning module of all tasks, on a model of two layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningDataModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from timm.optim import Lamb
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.models.vit import ViT, ViTConfig
from tasks.base import Batch, TaskModule
from tasks.ema import EMA
from tasks.optim import freeze, parameter_groups, warmup_cosine

STEPS = 5
"""Optimizer steps of an epoch."""


@dataclass(frozen=True)
class ToyConfig:
    """A width."""

    width: int = 4


class Toy(nn.Module):
    """A hidden layer that drops half of its units."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden = nn.Linear(3, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.position = nn.Parameter(torch.randn(1, config.width))
        self.head = nn.Linear(config.width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.hidden(x)) + self.position)

    def no_weight_decay(self) -> set[str]:
        return {"position"}

    @property
    def num_layers(self) -> int:
        return 3

    def layer_id(self, name: str) -> int:
        return {"hidden": 0, "norm": 1, "position": 1, "head": 2}[name.split(".")[0]]


class ToyModule(TaskModule):
    """Regression."""

    task = "toy"

    def build(self, *, scale: float = 1.0, **model: Any) -> Toy:
        self.scale = scale
        return Toy(ToyConfig(**model))

    def loss(self, batch: Batch) -> Tensor:
        return self.scale * (self.model(batch["x"]) - batch["y"]).square().mean()

    def metrics_of(self) -> dict[str, Metric]:
        return {"loss": MeanMetric(nan_strategy="disable")}

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        metrics["loss"].update((self.model(batch["x"]) - batch["y"]).square())


class ToyData(LightningDataModule):
    """The same batches in each epoch."""

    labels = None
    preprocess = None

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(STEPS * 4, 3, generator=generator)
        return DataLoader([{"x": row, "y": row.sum(0, keepdim=True)} for row in x], batch_size=4)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader


class Trace(Callback):
    """The learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return Trainer(
        callbacks=list(callbacks),
        default_root_dir=folder,
        **({"max_epochs": 4, "enable_checkpointing": saves} | quiet | options),
    )


def saved(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def weights(module: TaskModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Groups and schedule


def test_norms_biases_and_positions_do_not_decay() -> None:
    model = Toy(ToyConfig())
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, lr=0.1, weight_decay=0.5)
    by_decay = {group["weight_decay"]: {names[parameter] for parameter in group["params"]} for group in groups}
    assert by_decay == {
        0.5: {"hidden.weight", "head.weight"},
        0.0: {"hidden.bias", "norm.weight", "norm.bias", "position", "head.bias"},
    }
    assert {group["lr"] for group in groups} == {0.1}


def test_no_parameter_of_a_vit_but_a_matrix_decays() -> None:
    model = ViT(
        ViTConfig(image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2, layer_scale=0.1, num_registers=2)
    )
    decaying = {id(p) for g in parameter_groups(model, lr=1, weight_decay=1) if g["weight_decay"] for p in g["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decaying) == name.endswith(
            ("proj.weight", "fc1.weight", "fc2.weight", "head.weight")
        ), name


def test_each_layer_learns_slower_than_the_one_above() -> None:
    model = Toy(ToyConfig())
    groups = parameter_groups(model, lr=1.0, weight_decay=0.5, layer_decay=0.5)
    rates = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == 0.5 ** (2 - model.layer_id(name))


def test_frozen_parameters_are_not_optimised() -> None:
    model = Toy(ToyConfig())
    freeze(model, "hidden.*")
    optimised = {
        id(parameter) for group in parameter_groups(model, lr=1, weight_decay=0) for parameter in group["params"]
    }
    assert optimised == {id(parameter) for name, parameter in model.named_parameters() if "hidden" not in name}
    freeze(model, ["norm.*", "head.*", "position"])
    with pytest.raises(ValueError, match="no parameter is left to train"):
        parameter_groups(model, lr=1, weight_decay=0)


def test_layer_decay_needs_layers() -> None:
    with pytest.raises(ValueError, match=r"layer_decay is 0\.5, but Linear does not say what its layers are"):
        parameter_groups(nn.Linear(1, 1), lr=1, weight_decay=0, layer_decay=0.5)


@pytest.mark.parametrize("warmup", [4, 0.2])
def test_the_schedule_rises_linearly_and_falls_as_a_cosine(warmup: float) -> None:
    factor = warmup_cosine(20, warmup, final=0.1)
    assert [factor(step) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert [factor(4), factor(12), factor(20), factor(30)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert warmup_cosine(20, 0)(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "lr is 0, expected more than 0"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0\.9, 1\.0\), expected rates in \[0, 1\)"),
        ({"layer_decay": 0}, "layer_decay is 0, expected a factor"),
        ({"ema_decay": 1.0}, r"ema_decay is 1\.0, expected a rate in \(0, 1\)"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToyModule(**options)


def test_a_run_without_an_end_has_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the run has no end, or no step"):
        trainer(tmp_path, max_epochs=-1).fit(ToyModule(), ToyData())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_train_batches": 0}, "the run has no end, or no step"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0, expected at least 1"),
        ({"precision": "bf16-true"}, "ema_decay with trainer.precision bf16-true: its steps are too small"),
    ],
)
def test_a_trainer_that_could_not_train_right_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options).fit(ToyModule(ema_decay=0.9), ToyData())


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    class Break(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.model.hidden.bias.data.fill_(float("nan"))

    last = ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
    with pytest.raises(ValueError, match=r"not finite at step 5, learning rate .*: training has diverged"):
        trainer(tmp_path, Break(), last).fit(ToyModule(), ToyData())
    checkpoint = saved(tmp_path / "last.ckpt")
    assert checkpoint["epoch"] == 0
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())


def test_accumulation_over_more_batches_than_there_are_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="accumulate_grad_batches is 100, but an epoch has only 5 batches"):
        trainer(tmp_path, accumulate_grad_batches=100).fit(ToyModule(), ToyData())


# Resuming


def every_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", save_top_k=-1)


def test_four_epochs_are_two_and_two(tmp_path: Path) -> None:
    whole, rest = Trace(), Trace()
    uninterrupted = ToyModule(lr=0.1, ema_decay=0.5)
    start = weights(uninterrupted)
    trainer(tmp_path, whole, every_epoch(tmp_path)).fit(uninterrupted, ToyData())
    assert not equal(start, weights(uninterrupted))
    resumed = ToyModule(lr=0.1, ema_decay=0.5)
    resuming = trainer(tmp_path, rest, every_epoch(tmp_path / "rest"))
    resuming.fit(resumed, ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    assert len(whole.rates) == 4 * STEPS
    assert rest.rates == whole.rates[2 * STEPS :]
    assert whole.rates[0] < max(whole.rates) == 0.1
    assert equal(weights(uninterrupted), weights(resumed))


def test_lamb_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "lamb", "lr": 0.1, "layer_decay": 0.5}
    whole, rest = Trace(), Trace()
    uninterrupted, resumed, other = ToyModule(**options), ToyModule(**options), ToyModule(lr=0.1, layer_decay=0.5)
    other.load_state_dict(uninterrupted.state_dict())
    running = trainer(tmp_path, whole, every_epoch(tmp_path), gradient_clip_val=1.0)
    running.fit(uninterrupted, ToyData())
    assert isinstance(running.optimizers[0], Lamb)
    assert whole.rates[0] < max(whole.rates)
    resuming = trainer(tmp_path, rest, gradient_clip_val=1.0)
    resuming.fit(resumed, ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    assert rest.rates == whole.rates[2 * STEPS :]
    assert equal(weights(uninterrupted), weights(resumed))
    trainer(tmp_path, gradient_clip_val=1.0).fit(other, ToyData())
    assert not equal(weights(uninterrupted), weights(other))
    with pytest.raises(ValueError, match=r"model\.optimizer is adamw, expected lamb as in the run so far"):
        trainer(tmp_path).fit(ToyModule(), ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)


def test_lamb_is_timms_with_decay_for_matrices_alone() -> None:
    module = ToyModule(optimizer="lamb", weight_decay=0.3)
    ours = module._optimizer()
    assert {group["weight_decay"] for group in ours.param_groups} == {0.0, 0.3}
    assert ours.defaults["max_grad_norm"] is None
    assert ours.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_longer_run_is_said_and_follows_its_own_schedule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace, expected = Trace(), Trace()
    trainer(tmp_path, every_epoch(tmp_path), max_epochs=2).fit(ToyModule(lr=0.1), ToyData())
    resuming = trainer(tmp_path, trace, max_epochs=4)
    resuming.fit(ToyModule(lr=0.1), ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    assert (
        "The run is now 20 steps long, not 10: the schedule is that of the new length, from step 10 on" in caplog.text
    )
    trainer(tmp_path, expected, max_epochs=4).fit(ToyModule(lr=0.1), ToyData())
    assert trace.rates == expected.rates[2 * STEPS :]


def test_what_the_configuration_says_wins_over_what_is_resumed(tmp_path: Path) -> None:
    trainer(tmp_path, every_epoch(tmp_path), max_epochs=4).fit(ToyModule(lr=0.1), ToyData())
    changed, expected = Trace(), Trace()
    options = {"lr": 0.5, "weight_decay": 0.3, "betas": (0.5, 0.6)}
    resuming = trainer(tmp_path, changed)
    resuming.fit(ToyModule(**options), ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True)
    trainer(tmp_path, expected).fit(ToyModule(**options), ToyData())
    assert changed.rates == expected.rates[2 * STEPS :]
    groups = resuming.optimizers[0].param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert all(tuple(group["betas"]) == (0.5, 0.6) for group in groups)


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    trainer(tmp_path, every_epoch(tmp_path), max_epochs=1).fit(ToyModule(width=6, scale=2.0), ToyData())
    checkpoint = saved(tmp_path / "epoch=0.ckpt")
    assert checkpoint["multimodal"] == {
        "format": 1,
        "task": "toy",
        "config": {"width": 6},
        "preprocess": None,
        "labels": None,
        "tokenizer": None,
    }
    assert {"width": 6, "scale": 2.0}.items() <= checkpoint["hyper_parameters"].items()
    assert ToyModule.load_from_checkpoint(tmp_path / "epoch=0.ckpt").model.config.width == 6


# Moving average


class SaveWhileValidating(Callback):
    """Saves in the middle of the second epoch's validation, and at its end."""

    def __init__(self, folder: Path, stop: bool = False) -> None:
        self.folder = folder
        self.stop = stop

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            if self.stop:
                raise KeyboardInterrupt
            trainer.save_checkpoint(self.folder / "during.ckpt")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / "after.ckpt")

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "interrupted.ckpt")


@pytest.fixture
def averaged_run(tmp_path: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """Checkpoints of the same step: in the middle of a validation, after it, and when it was interrupted."""
    torch.manual_seed(0)
    trainer(tmp_path, SaveWhileValidating(tmp_path)).fit(ToyModule(ema_decay=0.9, lr=0.1), ToyData())
    torch.manual_seed(0)
    with pytest.raises(SystemExit):
        trainer(tmp_path, SaveWhileValidating(tmp_path, stop=True)).fit(ToyModule(ema_decay=0.9, lr=0.1), ToyData())
    return {name: saved(tmp_path / f"{name}.ckpt") for name in ("during", "after", "interrupted")}


@pytest.mark.parametrize("moment", ["during", "interrupted"])
def test_raw_and_averaged_weights_are_not_exchanged(averaged_run: dict[str, dict[str, Any]], moment: str) -> None:
    after, checkpoint = averaged_run["after"], averaged_run[moment]
    assert not equal(after["state_dict"], after["current_model_state"])
    assert equal(checkpoint["state_dict"], after["state_dict"])
    assert equal(checkpoint["current_model_state"], after["current_model_state"])


class Start(Callback):
    """The weights at the first step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.state = getattr(self, "state", None) or weights(pl_module)


def test_training_goes_on_from_the_raw_weights(averaged_run: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    start = Start()
    resuming = trainer(tmp_path, start)
    resuming.fit(ToyModule(ema_decay=0.9), ToyData(), ckpt_path=tmp_path / "interrupted.ckpt", weights_only=True)
    assert equal(start.state, averaged_run["after"]["current_model_state"])


def test_without_the_average_training_goes_on_from_the_raw_weights_too(
    averaged_run: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    module = ToyModule()
    start = Start()
    trainer(tmp_path, start).fit(module, ToyData(), ckpt_path=tmp_path / "after.ckpt", weights_only=True)
    assert equal(start.state, averaged_run["after"]["current_model_state"])


def test_the_average_has_the_precision_of_the_weights(tmp_path: Path) -> None:
    trainer(tmp_path, every_epoch(tmp_path), precision="64-true", max_epochs=1).fit(ToyModule(ema_decay=0.9), ToyData())
    checkpoint = saved(tmp_path / "epoch=0.ckpt")
    assert not equal(checkpoint["state_dict"], checkpoint["current_model_state"])


def test_the_average_is_what_is_measured(tmp_path: Path) -> None:
    module = ToyModule(ema_decay=0.9, lr=0.1)
    fitting = trainer(tmp_path, every_epoch(tmp_path))
    fitting.fit(module, ToyData())
    last = saved(tmp_path / "epoch=3.ckpt")
    assert equal(weights(module), last["state_dict"])
    fitting.validate(module, ToyData(), ckpt_path=tmp_path / "epoch=1.ckpt", weights_only=True, verbose=False)
    assert equal(weights(module), saved(tmp_path / "epoch=1.ckpt")["state_dict"])


def test_the_average_leaves_a_frozen_weight_bit_for_bit(tmp_path: Path) -> None:
    module = ToyModule(ema_decay=0.9, lr=0.1)
    module.model.hidden.requires_grad_(False)
    before = module.model.hidden.weight.clone()
    trainer(tmp_path).fit(module, ToyData())
    assert torch.equal(module.model.hidden.weight, before)


def test_without_a_decay_there_is_no_average(tmp_path: Path) -> None:
    fitting = trainer(tmp_path, max_epochs=1)
    fitting.fit(ToyModule(), ToyData())
    assert not any(isinstance(callback, EMA) for callback in fitting.callbacks)


# Compilation and precision


def test_a_compiled_model_keeps_its_keys() -> None:
    eager, compiled = ToyModule(), ToyModule(compile=True)
    compiled.setup("fit")
    assert compiled.model._compiled_call_impl is not None
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    assert all(key.startswith("model.") for key in eager.state_dict())


@pytest.mark.parametrize(
    ("precision", "clip", "fused"),
    [("32-true", 1.0, True), ("16-mixed", None, True), ("16-mixed", 1.0, False), ("bf16-mixed", 1.0, True)],
)
def test_adamw_is_fused_where_it_may_be(precision: str, clip: float | None, fused: bool) -> None:
    module = ToyModule()
    module._trainer = SimpleNamespace(  # type: ignore[assignment]
        precision=precision,
        gradient_clip_val=clip,
        estimated_stepping_batches=10,
        num_training_batches=5,
        accumulate_grad_batches=1,
    )
    assert module.configure_optimizers()["optimizer"].defaults["fused"] == fused


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_in_every_precision(tmp_path: Path, precision: Any, algorithm: str) -> None:
    class Gradients(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            grads = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            if grads:
                total = torch.cat([grad.flatten() for grad in grads])
                self.largest = float(total.norm() if algorithm == "norm" else total.abs().max())

    gradients = Gradients()
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "precision": precision}
    trainer(tmp_path, gradients, max_epochs=1, **options).fit(ToyModule(), ToyData())
    assert 0 < gradients.largest <= 1.001e-3


def test_a_nan_is_seen(tmp_path: Path) -> None:
    module = ToyModule()
    module.model.hidden.bias.data.fill_(float("nan"))
    validating = trainer(tmp_path)
    validating.validate(module, ToyData())
    assert validating.callback_metrics["val/loss"].isnan()
