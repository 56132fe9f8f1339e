"""A Linear with its activation: one oneDNN call for inference on CPU, where that was measured to pay.

`torch.ops.mkldnn._linear_pointwise` is what torch.compile emits for the same pair (tried with torch 2.14). It saves the
pass that spreads the bias over the output in bfloat16, and the activation's pass and memory in both dtypes.
"""

import torch
from torch import Tensor, nn

_FUSIBLE = {nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "swish", nn.Identity: "none"}
# dtype -> (fuse a Linear without an activation, least number of rows), measured by `python benchmarks/linear.py`
# (docs/results.md): in float32 the plain product is the faster one, and only on many rows does the activation make up.
_RULES = {torch.bfloat16: (True, 1), torch.float32: (False, 128)}

_IDENTITY = nn.Identity()


def linear(layer: nn.Module, x: Tensor, activation: nn.Module = _IDENTITY) -> Tensor:
    """activation(layer(x)) for x [..., in_features].

    A layer that is more than a plain `nn.Linear` (quantised, adapter-wrapped, sharded, hooked) is called as it is.
    """
    if _fuses(layer, x, activation):
        algorithm = getattr(activation, "approximate", "") if isinstance(activation, nn.GELU) else ""
        kind = _FUSIBLE[type(activation)]
        return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, kind, [], algorithm)
    return activation(layer(x))


def _fuses(layer: nn.Module, x: Tensor, activation: nn.Module) -> bool:
    # What is most often the case comes first: in decoding, these questions cost as much as the products.
    if torch.is_grad_enabled() or type(activation) not in _FUSIBLE or x.dtype not in _RULES:
        return False
    alone, least_rows = _RULES[x.dtype]
    if not (alone or type(activation) is not nn.Identity) or torch.compiler.is_compiling():
        return False
    if x.numel() < least_rows * x.shape[-1] or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter or layer.weight.dtype != x.dtype:
        return False
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in (layer, activation))
    return not hooked and torch.backends.mkldnn.is_available()


def lay_out_for_few_rows(model: nn.Module) -> None:
    """Turn the weights of all Linears in memory, in place: names, shapes and values stay as they are.

    In float32 on CPU, a product with some ten rows takes a sixth to a quarter less time with a weight that lies there
    as [in_features, out_features]. For inference: an optimizer and what is saved are better off without.
    """
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            layer.weight.data = layer.weight.data.t().contiguous().t()


class PackedWeight:
    """The product of a few rows with a large matrix, for decoding on CPU: the matrix is kept in oneDNN's own layout.

    It is packed at the first product, and again when the weight has changed, or may have changed since it was asked for
    a product with gradients; a second copy of it is in memory.
    """

    def __init__(self) -> None:
        self._key: tuple[int, int, torch.dtype] | None = None
        self._packed: torch.Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., in_features] times weight [out_features, in_features], as `torch.nn.functional.linear` has it."""
        if torch.is_grad_enabled():  # who trains may change the weight, which a fused optimizer does unseen
            self._key = self._packed = None
        if not self._packs(x, weight):
            return torch.nn.functional.linear(x, weight)
        key = (weight.data_ptr(), weight._version, weight.dtype)
        if key != self._key:
            rows = x.numel() // x.shape[-1]
            self._key, self._packed = key, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")

    @staticmethod
    def _packs(x: Tensor, weight: Tensor) -> bool:
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if type(weight) is not nn.Parameter or weight.is_inference() or torch.is_autocast_enabled("cpu"):
            return False
        return x.dtype in _RULES and weight.dtype == x.dtype and torch.backends.mkldnn.is_available()

    def __deepcopy__(self, memo: object) -> "PackedWeight":
        return PackedWeight()

    def __reduce__(self) -> tuple[type["PackedWeight"], tuple[()]]:
        return PackedWeight, ()
