"""The feed-forward half of a block.

B batch, N tokens, D embed_dim, M hidden_dim
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.dropout import Dropout
from multimodal.linear import linear

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]


class QuickGELU(nn.Module):
    """x · sigmoid(1.702 x), the GELU of OpenAI's CLIP weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(1.702 * x) / 1.702  # one fused kernel instead of three passes


def build_activation(name: Activation) -> nn.Module:
    """The activation of that name; `gelu` is the exact (erf) one."""
    match name:
        case "relu":
            return nn.ReLU()
        case "gelu":
            return nn.GELU()
        case "gelu_tanh":
            return nn.GELU("tanh")
        case "quick_gelu":
            return QuickGELU()
        case "silu":
            return nn.SiLU()
    raise ValueError(f"activation is {name!r}, expected relu, gelu, gelu_tanh, quick_gelu or silu")


class Mlp(nn.Module):
    """fc2(act(fc1(x))), or fc2(act(gate(x)) · fc1(x)) when gated ("GLU Variants Improve Transformer", Shazeer 2020).

    Args:
        embed_dim: width of input and output.
        hidden_dim: width in between.
        activation: see `build_activation`; `silu` with gated is SwiGLU.
        gated: multiply by an activated gate.
        bias: on all Linears.
        dropout: on the hidden activations.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.gate = nn.Linear(embed_dim, hidden_dim, bias=bias) if gated else None
        self.act = build_activation(activation)
        self.dropout = Dropout(dropout)
        self.fc2 = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, N, D]."""
        if self.gate is None:
            hidden = linear(self.fc1, x, self.act)
        else:
            hidden = linear(self.gate, x, self.act) * linear(self.fc1, x)
        return linear(self.fc2, self.dropout(hidden))
