"""Multi-head attention: one for every model of the suite.

B batch, Nq queries, Nk keys, D embed_dim, H heads, G key/value heads, K head_dim
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from multimodal.attention.cache import KVCache
from multimodal.attention.kernels import build_kernel
from multimodal.attention.kernels.naive import softmax_attention
from multimodal.attention.masks import merge_masks
from multimodal.attention.rope import Rope
from multimodal.linear import linear


class Attention(nn.Module):
    """Projections, heads, rotary positions, cache; the arithmetic is a kernel's.

    "Attention Is All You Need" (Vaswani et al. 2017), section 3.2.2; grouped heads: "GQA" (Ainslie et al. 2023).
    The projections are separate modules that are always called, never sliced, so that quantised, adapter-wrapped and
    sharded Linears work.

    Args:
        embed_dim: width of the queries and of the output.
        num_heads: query heads; divides embed_dim unless head_dim is given.
        num_kv_heads: key and value heads, divides num_heads; None = num_heads.
        head_dim: width of a head; None = embed_dim / num_heads.
        context_dim: width of keys and values where it differs from embed_dim.
        qkv_bias: bias on the three input projections.
        key_bias: False leaves the key alone without a bias (Whisper).
        out_bias: bias on the output projection.
        qk_norm: a norm over head_dim for queries and one for keys, made by calling this twice; None = none.
        dropout: on the attention weights. It leaves fused kernels on CPU, so 0 is the default.
        kernel: name of the kernel, see `multimodal.attention.kernels`.
        kernel_options: that kernel's own options.
        needs: what the model will ask of the kernel (see `Kernel.supports`); ValueError naming the pair if it cannot.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        qkv_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        qk_norm: Callable[[int], nn.Module] | None = None,
        dropout: float = 0.0,
        kernel: str = "auto",
        kernel_options: Mapping[str, Any] | None = None,
        needs: Iterable[str] = (),
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.head_dim = head_dim or embed_dim // num_heads
        self.kernel_name = kernel
        context_dim = context_dim or embed_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias=qkv_bias and key_bias)
        self.v_proj = nn.Linear(context_dim, num_kv_heads * self.head_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=out_bias)
        self.q_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = qk_norm(self.head_dim) if qk_norm else nn.Identity()
        self.kernel = build_kernel(kernel, kernel_options, dropout=dropout)
        for need in needs:
            self.require(need)

    def require(self, need: str) -> None:
        """ValueError, naming the pair, where the kernel does not support `need` (see `Kernel.supports`)."""
        if need not in self.kernel.supports:
            raise ValueError(f"attention kernel {self.kernel_name!r} does not support {need!r}, which the model needs")

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, H, N, K]

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        rope: Rope | None = None,
        cache: KVCache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: [B, Nq, D].
            key: [B, Nk, context_dim]; None = query.
            value: [B, Nk, context_dim]; None = key.
            key_mask: [B, Nk], True = may attend (False = padding).
            mask: [B|1, H|1, Nq|1, Nk], True = may attend.
            bias: added to the scaled scores, broadcasts over [B, H, Nq, Nk]; finite (use `mask` to forbid a pair).
            causal: query i sees the keys up to i + Nk - Nq.
            rope: rotary angles, applied to queries and keys after their projection.
            cache: keys and values of earlier calls; Nk above then counts them as well. A fixed cache that is filled is
                read in place of projecting `key` and `value`.
            need_weights: also return the weights, by plain softmax attention.

        Returns:
            Output [B, Nq, D] and the weights [B, H, Nq, Nk], or None unless asked for.

        Raises:
            ValueError: something is asked for that the kernel does not support.
        """
        key = query if key is None else key
        value = key if value is None else value
        q = self.q_norm(self._heads(linear(self.q_proj, query)))
        if rope is not None:
            q = rope.turn_query(q)
        if cache is not None and cache.complete:
            k, v = cache.read()
        else:
            k, v = self.k_norm(self._heads(linear(self.k_proj, key))), self._heads(linear(self.v_proj, value))
            if rope is not None:
                k = rope.turn_key(k)
            if cache is not None:
                k, v = cache.append(k, v)

        num_queries, num_keys = q.shape[2], k.shape[2]
        asked = {
            "causal": causal,
            "key_mask": key_mask is not None,
            "mask": mask is not None,
            "bias": bias is not None,
            "cross": cache is None and num_queries != num_keys,
            "cache": cache is not None,
            "weights": need_weights,
        }
        for need in (name for name, wanted in asked.items() if wanted):
            self.require(need)
        weights = None
        if need_weights:
            allowed = merge_masks(num_queries, num_keys, key_mask=key_mask, mask=mask, causal=causal, device=q.device)
            out, weights = self._with_weights(q, k, v, allowed, bias)
        else:
            scale = self.head_dim**-0.5
            out = self.kernel(q, k, v, key_mask=key_mask, mask=mask, bias=bias, causal=causal, scale=scale)
        return linear(self.out_proj, out.transpose(1, 2).flatten(2)), weights

    def _with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Plain softmax attention over the pairs that the kernel lets attend: output and weights."""
        pattern = self.kernel.pattern(q.shape[2], k.shape[2])
        if pattern is not None:
            pattern = pattern.to(q.device)
            allowed = pattern if allowed is None else allowed & pattern
        dropout = self.kernel.dropout if self.training else 0.0
        return softmax_attention(q, k, v, allowed=allowed, bias=bias, scale=self.head_dim**-0.5, dropout=dropout)
