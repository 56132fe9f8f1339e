"""Frozen batch norms without a pass of their own: computed by the convolution before them.

B batch, C channels, (H, W) size of the map
"""

from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchvision.ops import FrozenBatchNorm2d

CONV2D = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
FrozenNorm: TypeAlias = FrozenBatchNorm2d | FrozenBatchNormAct2d
"""What timm's `freeze_batch_norm_2d` leaves; the latter has an activation."""


def has_activation(norm: FrozenNorm) -> bool:
    """Whether an activation follows within the norm."""
    return not isinstance(getattr(norm, "act", nn.Identity()), nn.Identity)


class FoldedNorm(FrozenBatchNorm2d):
    """What a `NormedConv2d` leaves of its norm: the values under their keys, and the activation if there is one."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: Any) -> None:
        super().__init__(len(norm.weight), norm.eps)
        self.drop = getattr(norm, "drop", nn.Identity())
        self.act = getattr(norm, "act", nn.Identity())
        self.load_state_dict(norm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        if isinstance(self.act, nn.ReLU6) and self.act.inplace and x.requires_grad:
            return InplaceReLU6.apply(x)
        return self.act(x)


class NormedConv2d(nn.Conv2d):
    """A convolution and the frozen batch norm after it: a factor on the weights and a bias, with the same result."""

    def __init__(self, conv: nn.Conv2d, norm: FoldedNorm) -> None:
        shape: dict[str, Any] = {name: getattr(conv, name) for name in CONV2D}
        super().__init__(**shape, bias=conv.bias is not None, device="meta")
        self.weight, self.bias = conv.weight, conv.bias
        self.same = isinstance(conv, Conv2dSame)
        self.norm = (norm,)  # in a tuple, since the net has it as a module already, under the key of its weights

    def forward(self, x: Tensor) -> Tensor:
        (norm,) = self.norm
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        mean = norm.running_mean if self.bias is None else norm.running_mean - self.bias
        if self.same:
            x = F.pad(x, [pad for dim in (1, 0) for pad in self._same_padding(x.shape[2 + dim], dim)])
        return self._conv_forward(x, self.weight * scale[:, None, None, None], norm.bias - mean * scale)

    def _same_padding(self, size: int, dim: int) -> tuple[int, int]:
        """TensorFlow's, as timm has it, in terms that stay short where the size is a symbol of an exported graph."""
        reach, stride = self.dilation[dim] * (self.kernel_size[dim] - 1) + 1, self.stride[dim]
        if stride == 1:
            total = reach - 1
        else:
            total = reach - 1 - (size - 1) % stride
            total = total if reach >= stride else max(total, 0)
        return total // 2, total - total // 2


class InplaceReLU6(torch.autograd.Function):
    """torch's own copies its input for the backward pass, although the output tells as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        ctx.save_for_backward(x.clamp_(0, 6))
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.hardtanh_backward(grad, y, 0, 6)


def fold_norms(net: nn.Module, in_channels: int) -> None:
    """Have each frozen batch norm that directly follows a convolution computed by it; no key of the weights changes.

    Args:
        net: a model of timm.
        in_channels: channels of its images.
    """
    made: dict[int, tuple[str, Tensor]] = {}  # by the identity of a convolution's output, which is kept alive for that
    pairs: list[tuple[str, str]] = []

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if type(module) in (nn.Conv2d, Conv2dSame):
            made[id(output)] = name, output
        elif id(inputs[0]) in made:
            pairs.append((made[id(inputs[0])][0], name))

    trial = deepcopy(net).to("meta")  # a copy without values, whose forward pass costs nothing
    for name, module in trial.named_modules():
        if isinstance(module, nn.Conv2d | FrozenNorm) and not module._forward_hooks:
            module.register_forward_hook(partial(note, name))
    size = cast(Any, net).default_cfg["input_size"][1:]
    trial(torch.zeros(1, in_channels, *size, device="meta"))
    for conv, norm in pairs:
        folded = FoldedNorm(net.get_submodule(norm))
        net.set_submodule(norm, folded)
        net.set_submodule(conv, NormedConv2d(cast(nn.Conv2d, net.get_submodule(conv)), folded))
