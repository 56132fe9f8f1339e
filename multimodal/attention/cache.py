"""Keys and values kept between decoding steps. Passed in explicitly, never by hooks.

B batch, G key/value heads, N tokens, K head_dim
"""

from torch import Tensor


class KVCache:
    """Keys and values of one attention layer, in buffers that are allocated once, at the first call.

    For inference: the buffers are written in place, so no gradient flows back through more than one call.

    Args:
        max_length: tokens that fit.
        fixed: filled once and then only read: the keys and values of a context in cross-attention.
    """

    def __init__(self, max_length: int, *, fixed: bool = False) -> None:
        self.max_length = max_length
        self.fixed = fixed
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the keys and values need no further projection."""
        return self.fixed and self.length > 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [B, G, N, K] and return all so far [B, G, length, K]; ValueError where they do not fit."""
        if self.fixed:  # no buffer to grow into; head by head in memory, since each step reads all of it
            self.keys, self.values, self.length = k.contiguous(), v.contiguous(), k.shape[2]
            return self.read()
        end = self.length + k.shape[2]
        if end > self.max_length:
            raise ValueError(f"cache of {self.max_length} tokens cannot take {k.shape[2]} more after {self.length}")
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_empty(*x.shape[:2], self.max_length, x.shape[3]) for x in (k, v))
        if len(self.keys) != len(k):  # an assignment would broadcast
            raise ValueError(f"cache of {len(self.keys)} rows is given {len(k)}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values so far, each [B, G, length, K]."""
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty")
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was (beam search); index is int64 [B'] and may change the batch size."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = length

    def reset(self) -> None:
        """Forget everything; the next call may have another batch size."""
        self.length = 0
        self.keys = self.values = None


class StaticKVCache(KVCache):
    """Keys and values in whole buffers whatever is filled of them, so that one compiled graph serves every step.

    Who uses it masks what is not filled. It knows no length, and so is not for rotary positions.

    Args:
        keys, values: [B, G, N, K], finite, written in place.
        positions: int64 [M], where the next M tokens go.
    """

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.positions = keys, values, positions

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, G, M, K] at their positions, and return the buffers."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys.index_copy_(2, self.positions, k), self.values.index_copy_(2, self.positions, v)


class BlockCache:
    """The caches of one block.

    Args:
        max_length: tokens that the self-attention cache takes.
        cross_attn: whether the block also attends to a context.
    """

    def __init__(self, max_length: int, *, cross_attn: bool = False) -> None:
        self.self_attn = KVCache(max_length)
        self.cross_attn = KVCache(max_length, fixed=True) if cross_attn else None

    @classmethod
    def static(cls, keys: Tensor, values: Tensor, positions: Tensor) -> "BlockCache":
        """Of a block without cross-attention; see `StaticKVCache`."""
        cache = cls(keys.shape[2])
        cache.self_attn = StaticKVCache(keys, values, positions)
        return cache


class StackCache:
    """The caches of all blocks of a stack; made by `Stack.make_cache`."""

    def __init__(self, blocks: list[BlockCache]) -> None:
        self.blocks = blocks

    @property
    def length(self) -> int:
        """Tokens decoded so far."""
        return self.blocks[0].self_attn.length

    def reorder(self, index: Tensor, *, context: bool = True) -> None:
        """Reorder the batch of every cache, see `KVCache.reorder`.

        Args:
            index: int64 [B'].
            context: False spares the keys and values of the context, where row b and row index[b] have the same one.
        """
        for block in self.blocks:
            block.self_attn.reorder(index)
            if context and block.cross_attn is not None:
                block.cross_attn.reorder(index)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` decoded tokens; the context stays."""
        for block in self.blocks:
            block.self_attn.crop(length)

    def reset(self) -> None:
        """Forget tokens and context."""
        for block in self.blocks:
            block.self_attn.reset()
            if block.cross_attn is not None:
                block.cross_attn.reset()
