"""Rotary positions, the part that attention applies; `multimodal.blocks.position` makes the angles.

B batch, H heads, G key/value heads, N tokens, K head_dim
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeLayout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Rope:
    """Rotary angles of one call: (cos, sin), each [N, K] or [B, 1, N, K], of the queries and of the keys."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    layout: RopeLayout

    def turn_query(self, q: Tensor) -> Tensor:
        """Turn q [B, H, N, K] by its positions."""
        return self._turn(q, *self.query)

    def turn_key(self, k: Tensor) -> Tensor:
        """Turn k [B, G, N, K] by its positions."""
        return self._turn(k, *self.key)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.layout == "half":
            first, second = x.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            first, second = x[..., ::2], x[..., 1::2]
            turned = torch.stack([-second, first], dim=-1).flatten(-2)
        return (x * cos + turned * sin).to(x.dtype)
