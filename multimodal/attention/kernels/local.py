"""Sliding-window attention: each token sees the `window` tokens on either side.

"Longformer" (Beltagy et al. 2020), section 3.1. Time and memory grow with N · window.

B batch, H heads, G key/value heads, N tokens, K head_dim, W window, C number of chunks of W tokens
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.attention.kernels.base import Kernel


def _band(query_position: Tensor, key_position: Tensor, window: int, causal: bool) -> Tensor:
    """Pairs at most `window` apart (True); with `causal`, no later key."""
    offset = key_position[..., None, :] - query_position[..., :, None]
    return (offset.abs() <= window) & (offset <= 0) if causal else offset.abs() <= window


def _with_neighbours(x: Tensor, window: int) -> Tensor:
    """Chunks of W tokens along dim 2, each with the chunk before and after: [B, H, C·W, ...] -> [B, H, C, 3·W, ...]."""
    padding = [0, 0] * (x.dim() - 3) + [window, window]
    return F.pad(x, padding).unfold(2, 3 * window, window).movedim(-1, 3)


class LocalKernel(Kernel):
    """Window attention for self-attention of one length; keys further than `window` tokens away are not seen.

    Args:
        window: tokens seen on either side, at least 1.
        dropout: on the attention weights.
    """

    supports = frozenset({"causal", "key_mask", "dropout", "weights"})

    def __init__(self, *, window: int = 128, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        if window < 1:
            raise ValueError(f"attention_options: window is {window}, expected at least 1")
        self.window = window

    def pattern(self, num_queries: int, num_keys: int) -> Tensor | None:
        return _band(torch.arange(num_queries), torch.arange(num_keys), self.window, causal=False)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        scale: float,
    ) -> Tensor:
        length = q.shape[2]
        if length <= self.window + 1 and not causal:  # each token sees all
            allowed = None if key_mask is None else key_mask[:, None, None]
            rate = self.dropout if self.training else 0.0
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=rate, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
            )
        window = min(self.window, length)  # a longer one sees no more
        padding = -length % window
        q, k, v = (F.pad(x, [0, 0, 0, padding]) for x in (q, k, v))
        chunks = q.shape[2] // window
        valid = q.new_ones(1, length, dtype=torch.bool) if key_mask is None else key_mask
        valid = _with_neighbours(F.pad(valid, [0, padding]).unsqueeze(1), window)  # [B|1, 1, C, 3W]
        position = torch.arange(window, device=q.device)
        band = _band(position + window, torch.arange(3 * window, device=q.device), window, causal)  # [W, 3W]

        # Chunks lie in the batch, because torch's fused kernels take four dimensions.
        allowed = (band & valid.transpose(1, 2).unsqueeze(3)).expand(q.shape[0], -1, -1, -1, -1)  # [B, C, 1, W, 3W]
        out = F.scaled_dot_product_attention(
            q.unflatten(2, (chunks, window)).transpose(1, 2).flatten(0, 1),  # [B·C, H, W, K]
            _with_neighbours(k, window).transpose(1, 2).flatten(0, 1),  # [B·C, G, 3W, K]
            _with_neighbours(v, window).transpose(1, 2).flatten(0, 1),
            attn_mask=allowed.flatten(0, 1),
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        return out.unflatten(0, (-1, chunks)).transpose(1, 2).flatten(2, 3)[:, :, :length]
