"""Attention: projections, heads, masks, caches, and the kernels that do the arithmetic."""

from multimodal.attention.attention import Attention
from multimodal.attention.cache import BlockCache, KVCache, StackCache

__all__ = ["Attention", "BlockCache", "KVCache", "StackCache"]
