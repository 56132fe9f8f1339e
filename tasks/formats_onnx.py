"""ONNX for every task. The imports stand at the top, so that a missing one is told with the extra that brings it."""

import json
from pathlib import Path

import onnxruntime
import onnxscript  # noqa: F401  torch.onnx imports it late
import torch
from torch import Tensor

from multimodal.pretrained import Checkpoint
from multimodal.pretrained.checkpoint import KEY
from tasks.formats import Model, trace


def write_onnx(checkpoint: Checkpoint, out: Path) -> None:
    """One file, with the checkpoint's record under `multimodal` in its metadata.

    Weights of more than 2 GB, which ONNX's format cannot hold, lie beside it in `OUT.data`.
    """
    traced, example = trace(checkpoint)
    axes = tuple(
        {0: "batch", **{axis: free for axis, (free, _) in example.free.get(name, {}).items()}}
        for name in example.inputs
    )
    with torch.no_grad():  # as it was traced: with gradients attention lays out its output in another way
        program = torch.onnx.export(
            traced,
            dynamo=True,
            input_names=list(example.inputs),
            output_names=list(example.outputs),
            dynamic_shapes=(axes,),  # their names; that they are free, the trace says
            verbose=False,
        )
    assert program is not None
    program.model.metadata_props[KEY] = json.dumps(checkpoint.record())
    program.save(out)


def open_onnx(out: Path) -> Model:
    """A file that `write_onnx` wrote, run by onnxruntime on the CPU."""
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        fed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(value) for value in session.run(None, fed))

    return call
