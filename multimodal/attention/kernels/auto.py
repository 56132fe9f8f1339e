"""The default: plain or fused attention, whichever was measured to be faster.

In bfloat16 on CPU the fused backward pass is slow, the fused forward pass is not: so training and inference differ.

B batch, H heads, Nq queries, Nk keys, K head_dim
"""

import torch
from torch import Tensor

from multimodal.attention.kernels.base import Kernel
from multimodal.attention.kernels.naive import NaiveKernel
from multimodal.attention.kernels.sdpa import SdpaKernel

# (device, dtype) -> number of keys up to which plain attention is the faster one in training; absent = never.
# Measured by `python benchmarks/attention_kernels.py`; the figures are in docs/attention_kernels.md.
PLAIN_UP_TO = {("cpu", torch.bfloat16): 384}


class AutoKernel(Kernel):
    """Chooses between `naive` and `sdpa` at each call by device, dtype, number of keys, and whether it trains."""

    supports = NaiveKernel.supports & SdpaKernel.supports

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.plain = NaiveKernel(dropout=dropout)
        self.fused = SdpaKernel(dropout=dropout)

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
        trains = torch.is_grad_enabled() and q.requires_grad
        plain = trains and k.shape[2] <= PLAIN_UP_TO.get((v.device.type, v.dtype), 0)  # a norm may widen q, k
        kernel = self.plain if plain else self.fused
        return kernel(q, k, v, key_mask=key_mask, mask=mask, bias=bias, causal=causal, scale=scale)
