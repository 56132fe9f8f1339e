"""What an attention kernel is.

B batch, H heads, G key/value heads, Nq queries, Nk keys, K head_dim
"""

from typing import ClassVar

from torch import Tensor, nn


class Kernel(nn.Module):
    """Softmax attention of queries over keys, or something in its place.

    A subclass is built once per layer from its own options (the keyword arguments of its constructor), so it may hold
    parameters. It declares in `supports` what it can be asked for:

    - `causal`, `key_mask`, `mask`, `bias`: the argument of that name,
    - `cross`: another number of keys than of queries,
    - `cache`: queries that are the last of the keys (cached decoding),
    - `dropout`: dropout on the attention weights,
    - `weights`: the pairs that it lets attend are `pattern`, and over these it equals plain softmax attention, so that
      the naive kernel can return its weights.
    """

    supports: ClassVar[frozenset[str]]

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def pattern(self, num_queries: int, num_keys: int) -> Tensor | None:
        """The pairs [Nq, Nk] that this kernel ever lets attend; None = all."""
        return None

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
        """Attend.

        Args:
            q: [B, H, Nq, K].
            k, v: [B, G, Nk, K] with H a multiple of G; query head h reads key head h // (H / G).
            key_mask: [B, Nk], True = may attend.
            mask: [B|1, H|1, Nq|1, Nk], True = may attend.
            bias: added to the scaled scores, broadcasts over [B, H, Nq, Nk]; finite (use `mask` to forbid a pair).
            causal: bottom-right aligned causal mask.
            scale: factor on the scores.

        Returns:
            [B, H, Nq, K]; zeros for a query that may attend to nothing.
        """
        raise NotImplementedError
