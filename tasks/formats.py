"""The formats that every task can be exported to: this suite's own file and torch.export. ONNX is in `formats_onnx.py`.

A writer takes a checkpoint and a path; how a model is fed it asks the registry.
"""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from multimodal import pretrained
from multimodal.models import model_classes
from multimodal.pretrained import Checkpoint, build_config, load_weights
from multimodal.pretrained.checkpoint import KEY
from multimodal.pretrained.files import one_line, write_whole
from tasks import registry
from tasks.registry import Example

Model = Callable[..., tuple[Tensor, ...]]
"""Inputs [B, ...] by position to the outputs that there are."""


def build_model(checkpoint: Checkpoint, where: str) -> nn.Module:
    """The checkpoint's model, in evaluation mode."""
    model = model_classes(checkpoint.task)[0](build_config(checkpoint.task, checkpoint.config, where))
    load_weights(model, checkpoint.state_dict, where)
    return model.eval()


def example_of(checkpoint: Checkpoint, batch_size: int) -> Example:
    """Random inputs for the checkpoint's model, the same at each call; the global generator is left alone."""
    task = registry.get(checkpoint.task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(batch_size)
        return task.load(task.example)(build_config(checkpoint.task, checkpoint.config), batch_size)


def as_function(model: Callable[..., Any]) -> Model:
    """A model as a function that returns a tuple, without gradients; what is None in a model's output is left out."""

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _present(model(*inputs))

    return call


def _present(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(part for part in out if part is not None)


# ------------------------------------------------------------------------------------------ files that `load` takes


def write_safetensors(checkpoint: Checkpoint, out: Path) -> None:
    """This suite's own file."""
    pretrained.save(out, checkpoint)


def open_weights(out: Path) -> Model:
    """Whatever `pretrained.load` takes: this suite's file, and the folders of other libraries."""
    return as_function(pretrained.load(out).model)


# ----------------------------------------------------------------------------------------------------- torch.export


class Plain(nn.Module):
    """A model that returns its tensor, or a plain tuple of its tensors: a graph knows no class of ours."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = self.model(*inputs)
        return out if isinstance(out, Tensor) else _present(out)


def trace(checkpoint: Checkpoint) -> tuple[ExportedProgram, Example]:
    """The model as a graph for any batch size, and the inputs by which it was traced.

    Raises:
        ValueError: the model does something that no graph holds, or that fixes an axis that is to be free.
    """
    model, example = build_model(checkpoint, "export"), example_of(checkpoint, 2)
    shapes = tuple(
        {0: Dim("batch"), **{axis: Dim(free, min=least) for axis, (free, least) in example.free.get(name, {}).items()}}
        for name in example.inputs
    )
    try:
        with torch.no_grad():  # so that attention and Linears take their paths for inference
            program = torch.export.export(Plain(model), tuple(example.inputs.values()), dynamic_shapes=(shapes,))
    except Exception as error:  # torch.export raises many kinds
        raise ValueError(f"torch.export cannot make a graph of this model ({one_line(error)})") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine, which are no one else's business
    return program, example


def write_program(checkpoint: Checkpoint, out: Path) -> None:
    """A `.pt2` file, with the checkpoint's record as the extra file `multimodal`."""
    program, _ = trace(checkpoint)
    content = BytesIO()  # onto a full disk torch's own writer would end the process
    torch.export.save(program, content, extra_files={KEY: json.dumps(checkpoint.record())})
    write_whole(out, content.getbuffer())


def open_program(out: Path) -> Model:
    """A program that `write_program` wrote."""
    return as_function(torch.export.load(out).module())
