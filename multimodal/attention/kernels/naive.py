"""The readable reference: the definition of attention, in four lines.

"Attention Is All You Need" (Vaswani et al. 2017), section 3.2.1.

B batch, H heads, G key/value heads, Nq queries, Nk keys, K head_dim
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.attention.kernels.base import Kernel
from multimodal.attention.masks import merge_masks


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Nq, K] and weights [B, H, Nq, Nk]; `allowed` broadcasts over the weights, True = may attend."""
    if k.shape[1] != q.shape[1]:  # grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    # Contiguous keys, or the product would copy them in transposed order.
    scores = (q * scale) @ k.contiguous().transpose(-2, -1)  # [B, H, Nq, Nk]
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(v.dtype)  # torch accumulates in float32 for half precision too
    if allowed is not None:  # a query without any key gets zeros, not the mean of all
        weights = weights.masked_fill(~allowed, 0.0)
    if dropout:
        return F.dropout(weights, dropout) @ v, weights
    return weights @ v, weights


class NaiveKernel(Kernel):
    """Plain softmax attention; memory grows with Nq · Nk."""

    supports = frozenset({"causal", "key_mask", "mask", "bias", "cross", "cache", "dropout", "weights"})

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
        allowed = merge_masks(q.shape[2], k.shape[2], key_mask=key_mask, mask=mask, causal=causal, device=q.device)
        dropout = self.dropout if self.training else 0.0
        return softmax_attention(q, k, v, allowed=allowed, bias=bias, scale=scale, dropout=dropout)[0]
