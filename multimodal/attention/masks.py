"""Boolean attention masks. True = may attend, everywhere in this suite.

B batch, H heads, Nq queries, Nk keys
"""

import torch
from torch import Tensor


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """Bottom-right aligned causal mask [Nq, Nk]: query i sees the keys up to i + Nk - Nq.

    The alignment is what cached decoding needs: the last query always sees every key.
    """
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def merge_masks(
    num_queries: int,
    num_keys: int,
    *,
    key_mask: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    device: torch.device | None = None,
) -> Tensor | None:
    """One mask that broadcasts over [B, H, Nq, Nk], or None where every query may attend to every key.

    Args:
        key_mask: [B, Nk], False = padding.
        mask: [B|1, H|1, Nq|1, Nk].
        causal: bottom-right aligned, see `causal_mask`; nothing to mask for a single query.
    """
    parts = []
    if key_mask is not None:
        parts.append(key_mask[:, None, None, :])
    if mask is not None:
        parts.append(mask)
    if causal and num_queries > 1:
        parts.append(causal_mask(num_queries, num_keys, device))
    merged = None
    for part in parts:
        merged = part if merged is None else merged & part
    return merged
