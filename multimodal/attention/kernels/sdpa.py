"""PyTorch's fused attention: O(N) memory, and the backends that torch picks for the device.

B batch, H heads, G key/value heads, Nq queries, Nk keys, K head_dim
"""

import torch.nn.functional as F
from torch import Tensor

from multimodal.attention.kernels.base import Kernel
from multimodal.attention.masks import merge_masks


class SdpaKernel(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`. Attention dropout takes it off the fused path on CPU."""

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
        num_queries, num_keys = q.shape[2], k.shape[2]
        # torch's own causal flag is top-left aligned and refuses a mask beside it: right only for a square without one.
        unmasked = key_mask is None and mask is None and bias is None
        is_causal = bool(causal and unmasked and num_queries == num_keys)  # lengths of a traced graph are symbols
        attn_mask = merge_masks(
            num_queries, num_keys, key_mask=key_mask, mask=mask, causal=causal and not is_causal, device=q.device
        )
        if bias is not None:
            bias = bias.to(q.dtype)
            attn_mask = bias if attn_mask is None else bias.masked_fill(~attn_mask, float("-inf"))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attn_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
