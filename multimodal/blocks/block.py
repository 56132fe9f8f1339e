"""One Transformer block.

B batch, N tokens, M selected tokens, D embed_dim, H heads
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multimodal.attention import Attention, BlockCache
from multimodal.attention.rope import Rope
from multimodal.blocks.mlp import Mlp
from multimodal.blocks.residual import Residual

Selection = slice | Tensor
"""Which tokens: a slice of positions, or positions per row, int64 [B, M]."""


class BlockOutput(NamedTuple):
    """Tokens [B, N, D] and, where asked for, the attention weights [B, H, N, Nk] to itself and to the context."""

    tokens: Tensor
    self_weights: Tensor | None
    cross_weights: Tensor | None


def select_tokens(x: Tensor, selection: Selection | None, dim: int = 1) -> Tensor:
    """The selected tokens of x [B, ..., N, ...] along `dim`; all where selection is None."""
    if selection is None:
        return x
    if isinstance(selection, slice):
        return x[(slice(None),) * dim + (selection,)]
    batch = selection.shape[0]
    index = selection.view(batch, *[1] * (dim - 1), -1, *[1] * (x.dim() - dim - 1))
    x = x.expand(batch, *x.shape[1:])
    return x.gather(dim, index.expand(*x.shape[:dim], -1, *x.shape[dim + 1 :]))


def _select_rows(mask: Tensor | None, selection: Selection | None) -> Tensor | None:
    """The rows of a mask or bias [B|1, H|1, Nq|1, Nk] that belong to the selected queries."""
    return mask if mask is None or mask.shape[2] == 1 else select_tokens(mask, selection, dim=2)


def _select_rope(rope: Rope | None, selection: Selection | None) -> Rope | None:
    """The same keys, and the angles of the selected queries alone."""
    if rope is None or selection is None:
        return rope
    tables = (table if table.dim() == 4 else table[None, None] for table in rope.query)
    cos, sin = (select_tokens(table, selection, dim=2) for table in tables)
    return replace(rope, query=(cos, sin))


def _causal_rows(selection: Selection, length: int, device: torch.device) -> Tensor:
    """The rows [B|1, 1, M, N] of a causal mask that belong to the selected queries."""
    position = torch.arange(length, device=device)
    chosen = select_tokens(position[None], selection)  # [B|1, M]
    return position <= chosen[:, None, :, None]


class Block(nn.Module):
    """Self-attention, optional cross-attention to a context, and an MLP, each in a `Residual`.

    Args:
        self_attn: attention of the tokens to each other.
        mlp: the feed-forward part.
        residuals: one for each part, in the order of computation: 2, or 3 with cross-attention.
        cross_attn: attention to the context; None = none.
    """

    def __init__(
        self, self_attn: Attention, mlp: Mlp, residuals: list[Residual], *, cross_attn: Attention | None = None
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_residual = residuals[0]
        self.cross_attn = cross_attn
        self.cross_attn_residual = None if cross_attn is None else residuals[1]
        self.mlp = mlp
        self.mlp_residual = residuals[-1]

    def can_select(self, *, causal: bool) -> bool:
        """Whether the kernel can do what `forward(only=…)` asks: fewer queries than keys, a mask in place of causal."""
        supports = self.self_attn.kernel.supports
        return "cross" in supports and (not causal or "mask" in supports)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        pos: Tensor | None = None,
        context_pos: Tensor | None = None,
        key_mask: Tensor | None = None,
        context_key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        context_bias: Tensor | None = None,
        causal: bool = False,
        rope: Rope | None = None,
        cache: BlockCache | None = None,
        only: Selection | None = None,
        need_weights: bool = False,
    ) -> BlockOutput:
        """Transform x.

        Args:
            x: tokens [B, N, D].
            context: [B, Nc, context_dim] for cross-attention; may be None once the cache holds its keys and values.
            pos: added to the queries and keys of self-attention and the queries of cross-attention before their
                projection, [B|1, N, D] (DETR).
            context_pos: added to the keys of cross-attention, [B|1, Nc, context_dim].
            key_mask, mask, bias, causal, rope: of self-attention, see `Attention.forward`.
            context_key_mask, context_bias: of cross-attention, [B, Nc] and [B|1, H|1, N, Nc].
            cache: keys and values of earlier calls.
            only: compute the outputs of these tokens alone, [B, M, D]; all tokens still serve as keys.
            need_weights: also return the attention weights.
        """
        if only is not None:
            if cache is not None:
                raise ValueError("a block computes selected tokens only without a cache")
            mask = _select_rows(mask, only)
            if causal and (isinstance(only, Tensor) or only != slice(-1, None)):  # the last token sees all
                rows = _causal_rows(only, x.shape[1], x.device)
                mask, causal = rows if mask is None else mask & rows, False
            bias, rope = _select_rows(bias, only), _select_rope(rope, only)
        h = self.self_attn_residual.enter(x)
        key = h if pos is None else h + pos
        out, self_weights = self.self_attn(
            select_tokens(key, only),
            key,
            h,
            key_mask=key_mask,
            mask=mask,
            bias=bias,
            causal=causal,
            rope=rope,
            cache=None if cache is None else cache.self_attn,
            need_weights=need_weights,
        )
        x = self.self_attn_residual.leave(select_tokens(x, only), out)

        cross_weights = None
        if self.cross_attn is None and context is not None:
            raise ValueError("a context is given to a block without cross-attention")
        if self.cross_attn is not None and self.cross_attn_residual is not None:
            filled = cache is not None and cache.cross_attn is not None and cache.cross_attn.complete
            if context is None and not filled:
                raise ValueError("a block with cross-attention needs a context, or a cache that holds its keys")
            h = self.cross_attn_residual.enter(x)
            out, cross_weights = self.cross_attn(
                h if pos is None else h + select_tokens(pos, only),
                context if context is None or context_pos is None else context + context_pos,
                context,
                key_mask=context_key_mask,
                bias=_select_rows(context_bias, only),
                cache=None if cache is None else cache.cross_attn,
                need_weights=need_weights,
            )
            x = self.cross_attn_residual.leave(x, out)

        x = self.mlp_residual.leave(x, self.mlp(self.mlp_residual.enter(x)))
        return BlockOutput(x, self_weights, cross_weights)
