"""What a task and its peers give the benchmark: works, and who does them.

A task's record names two functions, `benchmark` and `peers`:

    workloads(size) -> list[Workload]       size is "tiny" (the default recipe's model) or "published"
    peers(work, setting) -> list[Peer]      published implementations of that work; imports within `forms`

The frame makes the data of a workload once, builds ours and the peers on it, and times them in interleaved rounds. It
does what must be the same for all: the optimizer, autocast of training, `inference_mode` of everything else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from multimodal.models import model_classes
from multimodal.pretrained import build_config
from tasks import registry

Data = Mapping[str, Any]
"""Tensors and other values by name."""
Config = TypeVar("Config")
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Under which conditions a work is done."""

    device: torch.device
    dtype: torch.dtype
    """In training of autocast, with weights in float32; else of the weights, which whoever builds a model converts."""
    compile: bool = False
    """Whether ours is compiled, and which forms of a peer may be."""
    attention: str | None = None
    """Kernel of our attention; None = that of the config."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Someone who does a work."""

    run: Callable[[], Any]
    """One call. In training the forward pass, which returns the loss, a scalar; the frame does what is left."""
    model: nn.Module | None
    """Whose parameters are counted, and trained where they ask for gradients; None for what is no PyTorch module."""
    parameters: int | None = None
    """The number of parameters where it is not that of the model's own."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A published implementation."""

    name: str
    """What it is called in tables."""
    package: str
    """The distribution whose version is told."""
    forms: Mapping[str, Callable[[Data], Subject]]
    """Ways to run it by name ("fused", "plain, compiled"): each builds a subject on the work's data, which is on the
    device. The fastest in a short trial is measured. `ModuleNotFoundError` skips the peer; `ValueError` says that a
    form cannot do this work, which is noted where none can; where none can and one fails otherwise, the peer failed."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A work of a task, and how ours does it."""

    model: str
    """Which model: "ViT-S/16, 224"."""
    name: str
    """Which work: "train", "inference", "decode"."""
    batch: int
    """Samples in a call."""
    data: Callable[[], Data]
    """The data on CPU, floating-point numbers in float32; seeded by the frame, which moves tensors to the device."""
    ours: Callable[[Setting, Data], Subject]
    """Builds ours on the data, which is on the device."""
    config: Any = None
    """What peers of the same size are built from: the model's config."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else peers must know to do the same."""
    trains: bool = False
    """Whether it is a training step."""
    lr: float = 1e-5
    """Of AdamW, in training."""
    clip: float | None = None
    """The gradient's norm is clipped at this; None = it is not."""
    unit: str = "samples"
    """What is counted as throughput: images, tokens, actions, seconds of audio."""
    items: float | None = None
    """How many of them a call does; None = `batch`."""
    audio_seconds: float | None = None
    """Of the recordings that a call takes from beginning to end, for the real-time factor."""
    reads: Callable[[Any], Iterable[nn.Module]] | None = None
    """The parts of our model whose weights are read; None = all."""
    steps: int = 1
    """How often a call reads them: in step-by-step work once a step."""
    told: Callable[[float], str] | None = None
    """What else there is to say of whoever takes so many seconds a call."""
    only_float32: bool = False
    """Whether it has no other precision."""
    compiles: bool = True
    """Whether ours can be compiled for it; else it runs as it is, though peers may be compiled."""

    @property
    def amount(self) -> float:
        """Items of `unit` in a call."""
        return self.batch if self.items is None else self.items


def parameters_of(subject: Subject) -> int | None:
    """How many parameters a subject has; None where it does not say."""
    if subject.parameters is not None or subject.model is None:
        return subject.parameters
    return sum(parameter.numel() for parameter in subject.model.parameters())


def weight_bytes(work: Workload, model: nn.Module) -> float:
    """Bytes of weights that a call of our model must move; see `Entry.weight_bytes`."""
    parts = [model] if work.reads is None else work.reads(model)
    once = sum(weight.numel() * weight.element_size() for part in parts for weight in part.parameters())
    return float(once * (10 if work.trains else work.steps))


def to_device(data: Data, device: torch.device) -> dict[str, Any]:
    """The data with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}


# ------------------------------------------------------------------------------------------------ what tasks build with


def with_attention(config: Config, kernel: str | None) -> Config:
    """A model's config with another attention kernel in all of its stacks; None = as it is."""
    if kernel is None:
        return config
    changes: dict[str, Any] = {}
    for one in fields(config):  # type: ignore[arg-type]
        value = getattr(config, one.name)
        if is_dataclass(value):
            changes[one.name] = with_attention(value, kernel)
        elif one.name == "attention":
            changes |= {"attention": kernel, "attention_options": {}}  # options belong to the kernel that they are for
    return replace(config, **changes)  # type: ignore[type-var]


def ready(model: Model, setting: Setting, *, trains: bool = False) -> Model:
    """The model on its device: in training with weights in float32, else for evaluation in the setting's dtype."""
    return (model.to(setting.device) if trains else model.to(setting.device, setting.dtype)).train(trains)


def both_ways(loss: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Subject:
    """Who computes a loss and the gradients of its inputs, without a model and an optimizer."""

    def run() -> Sequence[Tensor]:
        with torch.inference_mode(False):  # in which the frame runs whatever is no training step
            return torch.autograd.grad(loss(), inputs)

    return Subject(run=run, model=None)


def compiled(function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """A model, or a method of one, compiled where the setting says so."""
    return torch.compile(function) if setting.compile else function


def model_for(task: str, config: Any, setting: Setting) -> nn.Module:
    """The task's model for inference, with random weights."""
    return ready(model_classes(task)[0](with_attention(config, setting.attention)), setting)


def training(task: str, config: Any, setting: Setting, data: Data, **options: Any) -> Subject:
    """The task's own loss of a batch; `options` are those of its module."""
    record = registry.get(task)
    config = with_attention(config, setting.attention)
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    module = record.load(record.module)(**values, **options)
    module.to(setting.device).train()
    ready(module.model, setting, trains=True)
    if setting.compile:
        module.model.compile()  # in place: the module calls it by its name
    return Subject(run=lambda: module.loss(data), model=module.model)


def default_recipe(task: str, **linked: Any) -> tuple[Any, dict[str, Any]]:
    """The model's config of the task's default recipe, and the module's other options.

    `linked` are the fields that the recipe leaves to its data.
    """
    import yaml

    recipe = yaml.safe_load(registry.get(task).config_path.read_text())["model"] | linked
    names = {one.name for one in fields(model_classes(task)[1])}
    config = build_config(task, {name: value for name, value in recipe.items() if name in names})
    return config, {name: value for name, value in recipe.items() if name not in names}
