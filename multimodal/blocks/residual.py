"""The sole home of norm order, drop path and layer scale.

B batch, N tokens, D embed_dim
"""

from typing import Literal

import torch
from torch import Tensor, nn

from multimodal.blocks.dropout import Dropout

NormKind = Literal["layer", "rms"]
NormOrder = Literal["pre", "post"]


def build_norm(kind: NormKind, dim: int, eps: float) -> nn.Module:
    """LayerNorm, or RMSNorm ("Root Mean Square Layer Normalization", Zhang & Sennrich 2019), over the last dim."""
    match kind:
        case "layer":
            return nn.LayerNorm(dim, eps=eps)
        case "rms":
            return nn.RMSNorm(dim, eps=eps)
    raise ValueError(f"norm is {kind!r}, expected layer or rms")


class DropPath(nn.Module):
    """Drop a branch for whole samples ("Deep Networks with Stochastic Depth", Huang et al. 2016); keeps the mean.

    Args:
        rate: probability of dropping, in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        kept = torch.empty(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device).bernoulli_(keep)
        return x * (kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class LayerScale(nn.Module):
    """A learned factor per channel ("Going deeper with Image Transformers", Touvron et al. 2021, section 2)."""

    def __init__(self, dim: int, init: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Residual(nn.Module):
    """x + f(norm(x)) (pre) or norm(x + f(x)) (post), with dropout, layer scale and drop path on the branch f.

    Used as `residual.leave(x, f(residual.enter(x)))`.

    Args:
        dim: width.
        order: where the norm stands.
        norm: kind of norm.
        eps: of the norm.
        dropout: on the branch's output.
        layer_scale: initial factor of a `LayerScale`; None = none.
        drop_path: rate of a `DropPath`.
    """

    def __init__(
        self,
        dim: int,
        *,
        order: NormOrder = "pre",
        norm: NormKind = "layer",
        eps: float = 1e-5,
        dropout: float = 0.0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.pre = order == "pre"
        self.norm = build_norm(norm, dim, eps)
        self.dropout = Dropout(dropout)
        self.layer_scale = None if layer_scale is None else LayerScale(dim, layer_scale)
        self.drop_path = DropPath(drop_path) if drop_path else None

    def enter(self, x: Tensor) -> Tensor:
        """The input [B, N, D] of the branch."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, branch: Tensor) -> Tensor:
        """The sum of x and the branch's output, both [B, N, D]."""
        branch = self.dropout(branch)
        if self.layer_scale is not None:
            branch = self.layer_scale(branch)
        if self.drop_path is not None:
            branch = self.drop_path(branch)
        x = x + branch
        return x if self.pre else self.norm(x)
