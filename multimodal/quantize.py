"""Whisper with int8 Linears, for transcription on CPU: weights by output channel, activations by row as they come.

`torch.ops.onednn.qlinear_pointwise` is what torch.compile emits for such a product. Kernels that scale a whole batch of
activations alike (torch.ao.quantization, which is deprecated) would let a recording's text depend on its neighbours.
"""

import torch
from torch import Tensor, nn

from multimodal.linear import PackedWeight
from multimodal.models.whisper import Whisper

HOLDS_FOR = "torch 2.14 and float32 weights on an x86 CPU with AVX512-VNNI"
_TORCH = "2.14."
# Measured by one thread with 1, 5 and 8 rows: 768 × 3072 gains in all, 1024 × 1024 and less lose with 1.
_LEAST_WEIGHTS = 2_000_000


def quantize(model: Whisper) -> None:
    """Make int8, in place, the Linears that gain by it and the output head; `HOLDS_FOR` says where that holds.

    The model is for inference from then on: `state_dict` refuses, for what is saved are weights as they were trained.

    Raises:
        ValueError: another torch, processor, device or dtype.
    """
    _check(model.embed.weight)
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and _pays(path, layer):
            model.set_submodule(path, Int8Linear(layer))
    model.step_head = Int8Head(model.embed.weight)


def _pays(path: str, layer: nn.Linear) -> bool:
    """Whether it sees all audio tokens, or is so large that a step of few tokens is bound by reading it."""
    of_audio = path.startswith("encoder.") or path.endswith((".cross_attn.k_proj", ".cross_attn.v_proj"))
    return of_audio or layer.weight.numel() >= _LEAST_WEIGHTS


def _check(weight: Tensor) -> None:
    found = ""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        found = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    elif not torch.__version__.startswith(_TORCH):
        found = f"torch {torch.__version__}"
    elif not torch.cpu.get_capabilities().get("avx512_vnni", False):
        found = "a CPU without it"
    if found:
        raise ValueError(f"int8: {found}, expected {HOLDS_FOR}")


class _Int8Product:
    """Rows x [..., in_features] times a weight [out_features, in_features] that is kept in int8.

    Both are scaled to −127…127, the weight by its row, x by its own. Products are summed in int32.
    """

    def __init__(self, weight: Tensor) -> None:
        weight = weight.detach()
        self.scale = _scale(weight)[:, 0]
        self.zero_point = torch.zeros(len(weight), dtype=torch.int32)
        self.int8 = torch.ops.onednn.qlinear_prepack(_round(weight, self.scale[:, None]), None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        scale = _scale(x)
        out = torch.ops.onednn.qlinear_pointwise(
            _round(x, scale), 1.0, 0, self.int8, self.scale, self.zero_point,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale)


def _scale(x: Tensor) -> Tensor:
    """Of each row [..., 1]: what 127 stands for is the largest of it."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=1e-20).div_(127)


def _round(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round_().to(torch.int8)


class Int8Linear(nn.Module):
    """A Linear in int8; the weight that it is made of is not kept."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.product = _Int8Product(layer.weight)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return self.product(x, self.bias)

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
        raise ValueError("an int8 model is for inference, expected the model that it was made of")


class Int8Head(PackedWeight):
    """The output head, of the weight as it is now; the embedding itself stays as it is."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.product = _Int8Product(weight)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """As of `PackedWeight`."""
        return self.product(x, None)
