"""What a task and its peers give the benchmark: works, and who does them.

A task's record names two functions, `benchmark` and `peers`:

    workloads(size) -> list[Workload]       size is "tiny" (the default recipe's model) or "published"
    peers(work, setting) -> list[Peer]      published implementations of that work; imports within `build`

The frame makes the data of a workload once, builds ours and the peers on it, and times them in interleaved rounds. It
does what must be the same for all: the optimizer, autocast of training, `inference_mode` of everything else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Data = Mapping[str, Any]
"""Tensors and other values by name."""


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
    """One call. In training the forward pass, which returns the loss (a scalar); the frame does the rest of the step.
    Whatever has to be asynchronous or cached is the callable's own business, but it ends with the work issued."""
    model: nn.Module | None
    """Whose parameters are counted, and trained where they ask for gradients; None for what is no PyTorch module."""
    parameters: int | None = None
    """The number of parameters where it is not that of the model's own."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A published implementation."""

    name: str
    """What it is called in tables: "timm"."""
    package: str
    """The distribution whose version is told: "timm"."""
    forms: Mapping[str, Callable[[Data], Subject]]
    """Ways to run it by name ("fused", "plain", "plain, compiled"): each builds a subject on the work's data, which is on
    the device. The fastest of a short trial is measured. A `ModuleNotFoundError` skips the peer, any other error its
    form."""


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
    trains: bool = False
    """Whether it is a training step."""
    unit: str = "samples"
    """What is counted as throughput: images, tokens, actions, seconds of audio."""
    items: float | None = None
    """How many of them a call does; None = `batch`."""
    lr: float = 1e-5
    """Of AdamW, in training."""
    clip: float | None = None
    """The gradient's norm is clipped at this; None = it is not."""
    bytes_read: Callable[[nn.Module], float] | None = None
    """Bytes of weights that a call has to read from memory, where that bounds it: in decoding, once for each token."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else peers must know to do the same."""

    @property
    def amount(self) -> float:
        """Items of `unit` in a call."""
        return self.batch if self.items is None else self.items


def parameters_of(subject: Subject) -> int | None:
    """How many parameters a subject has; None where it does not say."""
    if subject.parameters is not None or subject.model is None:
        return subject.parameters
    return sum(parameter.numel() for parameter in subject.model.parameters())


def to_device(data: Data, device: torch.device) -> dict[str, Any]:
    """The data with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in data.items()}
