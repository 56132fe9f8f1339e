"""A stack of blocks, and the configuration that all models of the suite share.

B batch, N tokens, D embed_dim
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.attention import Attention, BlockCache, StackCache
from multimodal.attention.kernels import split_options
from multimodal.attention.rope import RopeLayout
from multimodal.blocks.block import Block, BlockOutput, Selection, select_tokens
from multimodal.blocks.init import InitScheme, init_block
from multimodal.blocks.mlp import Activation, Mlp
from multimodal.blocks.position import RotaryPosition
from multimodal.blocks.residual import NormKind, NormOrder, Residual, build_norm


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """What a stack of blocks is made of. A field that says "or one per layer" takes one value or `depth` of them."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "mlp_dropout", "attention_dropout", "drop_path", "activation_checkpointing"}
    )
    """Fields that alter how a model learns, not what it computes: they may change while it is trained."""

    embed_dim: int = 384
    """Width of the tokens."""
    depth: int = 12
    """Number of blocks."""
    num_heads: int = 6
    """Attention heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None = num_heads."""
    head_dim: int | None = None
    """Width of a head; None = embed_dim / num_heads."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP over embed_dim."""
    activation: Activation = "gelu"
    """Activation of the MLP; `gelu` is the exact one."""
    gated: bool = False
    """Gated MLP; with `silu` this is SwiGLU."""
    norm: NormKind = "layer"
    """LayerNorm or RMSNorm."""
    norm_eps: float = 1e-5
    """Epsilon of every norm."""
    norm_order: NormOrder = "pre"
    """Norm before each part (pre) or after its residual sum (post)."""
    final_norm: bool = True
    """A norm after the last block."""
    qkv_bias: bool = True
    """Bias on the query, key and value projections."""
    key_bias: bool = True
    """False leaves the key projection alone without a bias (Whisper)."""
    out_bias: bool = True
    """Bias on the attention's output projection."""
    mlp_bias: bool = True
    """Bias on the MLP's Linears."""
    qk_norm: bool = False
    """Norm queries and keys over each head before attention."""
    layer_scale: float | None = None
    """Initial value of a learned factor per channel on each residual branch; None = none."""
    dropout: float = 0.0
    """Dropout on each residual branch."""
    mlp_dropout: float = 0.0
    """Dropout on the MLP's hidden activations."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights; it leaves the fused path on CPU."""
    drop_path: float | tuple[float, ...] = 0.0
    """Stochastic depth: the last layer's rate, rising linearly from 0, or one per layer."""
    attention: str | tuple[str, ...] = "auto"
    """Attention kernel: auto, sdpa, naive, local, or any file of multimodal/attention/kernels; or one per layer."""
    attention_options: dict[str, Any] = field(default_factory=dict)
    """The kernel's own options, such as `window` of local."""
    rope: RopeLayout | None = None
    """Rotary positions in self-attention, in the layout half or interleaved; None = none."""
    rope_base: float = 10000.0
    """Longest period of the rotary positions over 2π."""
    init: InitScheme = "vit"
    """Family whose initialisation is used."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, about a third more time."""

    def __post_init__(self) -> None:
        for name in ("embed_dim", "depth", "num_heads"):
            self._expect(name, getattr(self, name) >= 1, "at least 1")
        self._expect("mlp_ratio", self.mlp_ratio > 0, "more than 0")
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} is not a multiple of num_heads {self.num_heads}")
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        self._expect("head_dim", self.head_dim is None or self.head_dim >= 1, "at least 1")
        for name in ("dropout", "mlp_dropout", "attention_dropout"):
            self._expect(name, 0 <= getattr(self, name) < 1, "a rate in [0, 1)")
        self._expect("drop_path", all(0 <= rate < 1 for rate in self.drop_path_rates), "rates in [0, 1)")
        for name in ("drop_path", "attention"):
            value = getattr(self, name)
            per_layer = isinstance(value, tuple | list)
            self._expect(name, not per_layer or len(value) == self.depth, f"one value or depth = {self.depth} of them")

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

    @property
    def drop_path_rates(self) -> tuple[float, ...]:
        """The rate of each layer."""
        if isinstance(self.drop_path, int | float):
            return tuple(self.drop_path * i / max(self.depth - 1, 1) for i in range(self.depth))
        return tuple(self.drop_path)

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """The kernel of each layer."""
        return (self.attention,) * self.depth if isinstance(self.attention, str) else tuple(self.attention)


class StackOutput(NamedTuple):
    """What a stack returns; the tuples hold only what was asked for."""

    last: Tensor
    """Tokens [B, N, D] after the last block and the final norm."""
    layers: tuple[Tensor, ...] = ()
    """Tokens after each asked-for block, before the final norm."""
    self_weights: tuple[Tensor, ...] = ()
    """Self-attention weights [B, H, N, N] of each asked-for block; the last one has the selected rows alone."""
    cross_weights: tuple[Tensor, ...] = ()
    """Cross-attention weights [B, H, N, Nc] of each asked-for block."""


class Stack(nn.Module):
    """`depth` blocks and a final norm.

    Args:
        config: what the blocks are made of.
        causal: each token sees itself and earlier ones alone.
        context_dim: width of a context that every block also attends to; None = no cross-attention.
    """

    def __init__(self, config: StackConfig, *, causal: bool = False, context_dim: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.causal = causal
        head_dim = config.head_dim or config.embed_dim // config.num_heads
        self.rotary = RotaryPosition(head_dim, layout=config.rope, base=config.rope_base) if config.rope else None
        blocks = nn.ModuleList(_build_block(config, i, causal, context_dim) for i in range(config.depth))
        self.blocks: Sequence[Block] = blocks  # type: ignore[assignment]
        self.norm = build_norm(config.norm, config.embed_dim, config.norm_eps) if config.final_norm else nn.Identity()
        for block in self.blocks:
            init_block(block, config.init, width=config.embed_dim, depth=config.depth)

    def make_cache(self, max_length: int) -> StackCache:
        """An empty cache for decoding up to `max_length` tokens; ValueError where a kernel cannot use one."""
        for block in self.blocks:
            block.self_attn.require("cache")
        return StackCache([BlockCache(max_length, cross_attn=b.cross_attn is not None) for b in self.blocks])

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
        cache: StackCache | None = None,
        only: Selection | None = None,
        need_layers: Collection[int] = (),
        need_weights: Collection[int] = (),
    ) -> StackOutput:
        """Transform x through all blocks.

        Args:
            x: tokens [B, N, D].
            context, pos, context_pos, key_mask, context_key_mask, mask, bias: see `Block.forward`.
            cache: from `make_cache`; x then holds the tokens that follow the cached ones.
            only: the tokens whose final output is wanted; without a cache, the last block computes these alone where
                its kernel can.
            need_layers: indices of the blocks whose outputs are wanted.
            need_weights: indices of the blocks whose attention weights are wanted; the others stay on their kernel.
        """
        offset = 0 if cache is None else cache.length
        rope = None if self.rotary is None else self.rotary(x.shape[1], offset, device=x.device)
        inputs = {
            "context": context,
            "pos": pos,
            "context_pos": context_pos,
            "key_mask": key_mask,
            "context_key_mask": context_key_mask,
            "mask": mask,
            "bias": bias,
            "causal": self.causal,
            "rope": rope,
        }
        early = None
        layers, self_weights, cross_weights = [], [], []
        for i, block in enumerate(self.blocks):
            last = i == len(self.blocks) - 1 and i not in need_layers and cache is None
            early = only if last and block.can_select(causal=self.causal) else None
            out = self.run_block(
                block, x, inputs, cache=cache.blocks[i] if cache else None, only=early, need_weights=i in need_weights
            )
            x = out.tokens
            if i in need_layers:
                layers.append(x)
            if out.self_weights is not None:
                self_weights.append(out.self_weights)
            if out.cross_weights is not None:
                cross_weights.append(out.cross_weights)
        if early is None:
            x = select_tokens(x, only)
        return StackOutput(self.norm(x), tuple(layers), tuple(self_weights), tuple(cross_weights))

    def run_block(self, block: Block, x: Tensor, inputs: Mapping[str, Any], **options: Any) -> BlockOutput:
        """One block of the stack, recomputed in the backward pass where the config says so; see `Block.forward`."""
        run = partial(block, **inputs, **options)
        if self.config.activation_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(run, x, use_reentrant=False)
        return run(x)


def _build_block(config: StackConfig, index: int, causal: bool, context_dim: int | None) -> Block:
    kernel = config.attention_kernels[index]
    attention = partial(
        Attention,
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        key_bias=config.key_bias,
        out_bias=config.out_bias,
        qk_norm=partial(build_norm, config.norm, eps=config.norm_eps) if config.qk_norm else None,
        dropout=config.attention_dropout,
        kernel=kernel,
        kernel_options=split_options(config.attention_kernels, config.attention_options)[kernel],
    )
    residual = partial(
        Residual,
        config.embed_dim,
        order=config.norm_order,
        norm=config.norm,
        eps=config.norm_eps,
        dropout=config.dropout,
        layer_scale=config.layer_scale,
        drop_path=config.drop_path_rates[index],
    )
    needs = [name for name, asked in (("causal", causal), ("dropout", config.attention_dropout)) if asked]
    return Block(
        attention(needs=needs),
        Mlp(
            config.embed_dim,
            round(config.embed_dim * config.mlp_ratio),
            activation=config.activation,
            gated=config.gated,
            bias=config.mlp_bias,
            dropout=config.mlp_dropout,
        ),
        [residual() for _ in range(2 if context_dim is None else 3)],
        cross_attn=None if context_dim is None else attention(context_dim=context_dim, needs=["cross"]),
    )
