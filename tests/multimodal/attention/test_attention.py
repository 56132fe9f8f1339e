"""Attention around its kernel: projections, weights on request, symmetry, what it refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multimodal.attention import Attention
from multimodal.attention.kernels import kernel_class, kernel_names
from tests.parity.keys import assert_close

WITH_WEIGHTS = [name for name in kernel_names() if "weights" in kernel_class(name).supports]
OPTIONS: dict[str, dict[str, Any]] = {"local": {"window": 2}}


def identity_projections(attention: Attention) -> Attention:
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        nn.init.eye_(projection.weight)
        nn.init.zeros_(projection.bias)
    return attention


def test_permutation_equivariance() -> None:
    """Without positions, permuted tokens give permuted outputs."""
    attention, x, order = Attention(16, 4), torch.randn(2, 9, 16), torch.randperm(9)
    assert_close(attention(x[:, order])[0], attention(x)[0][:, order])


def test_scale_is_the_root_of_head_dim() -> None:
    """Against the formula itself, one head, identity projections."""
    x = torch.randn(2, 5, 16)
    expected = (x @ x.transpose(1, 2) / 4).softmax(-1) @ x
    assert_close(identity_projections(Attention(16, 1))(x)[0], expected)


@pytest.mark.parametrize("kernel", WITH_WEIGHTS)
def test_weights(kernel: str) -> None:
    """Rows sum to one (to zero where nothing may be attended), and times the values they are the output."""
    attention = identity_projections(Attention(16, 4, kernel=kernel, kernel_options=OPTIONS.get(kernel)))
    x, key_mask = torch.randn(2, 9, 16), torch.tensor([[True] * 9, [False] * 9])
    out, weights = attention(x, key_mask=key_mask, causal=True, need_weights=True)
    assert_close(weights.sum(-1), key_mask[:, None].expand(2, 4, 9).float())
    assert (weights.triu(1) == 0).all()
    heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
    assert_close(out, (weights @ heads).transpose(1, 2).flatten(2))
    assert_close(out, attention(x, key_mask=key_mask, causal=True)[0])
    assert attention(x)[1] is None


def test_weights_in_training_keep_dropout() -> None:
    """Asking for weights does not switch dropout off; the weights told are those before it."""
    attention, x = Attention(16, 4, dropout=0.5), torch.randn(2, 9, 16)
    first, weights = attention(x, need_weights=True)
    second, again = attention(x, need_weights=True)
    assert not torch.allclose(first, second)
    assert_close(weights, again)
    assert_close(weights.sum(-1), torch.ones(2, 4, 9))


def test_projections_are_called_as_modules() -> None:
    """So quantised or adapter-wrapped Linears, which may have no `weight`, work in their place."""

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = [inner]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0](x)

    attention, x, context = Attention(16, 4), torch.randn(2, 5, 16), torch.randn(2, 3, 16)
    expected = attention(x, context)[0]
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(attention, name, Wrapped(getattr(attention, name)))
    assert attention(x, context)[0].equal(expected)


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ({}, set()),
        ({"key_bias": False}, {"k_proj"}),
        ({"qkv_bias": False}, {"q_proj", "k_proj", "v_proj"}),
        ({"out_bias": False}, {"out_proj"}),
    ],
)
def test_absent_biases(options: dict[str, bool], absent: set[str]) -> None:
    attention = Attention(16, 4, **options)
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    assert {name for name in projections if getattr(attention, name).bias is None} == absent


def test_widths() -> None:
    """Keys and values have a width and a head count of their own; head_dim need not be embed_dim / num_heads."""
    attention = Attention(16, 4, num_kv_heads=2, head_dim=6, context_dim=10, qk_norm=partial(nn.LayerNorm, eps=1e-6))
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters() if p.dim() == 2}
    assert shapes == {
        "q_proj.weight": (24, 16),
        "k_proj.weight": (12, 10),
        "v_proj.weight": (12, 10),
        "out_proj.weight": (16, 24),
    }
    assert attention.q_norm.weight.shape == (6,)
    out, weights = attention(torch.randn(2, 5, 16), torch.randn(2, 3, 10), need_weights=True)
    assert out.shape == (2, 5, 16)
    assert weights.shape == (2, 4, 5, 3)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kernel", kernel_names())
def test_bf16_autocast(kernel: str, need_weights: bool) -> None:
    """RMSNorm under autocast widens queries and keys, not values."""
    attention = Attention(16, 4, kernel=kernel, kernel_options=OPTIONS.get(kernel), qk_norm=nn.RMSNorm)
    x = torch.randn(2, 9, 16)
    expected = attention(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(x, need_weights=need_weights)[0]
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "embed_dim 16 is not a multiple of num_heads 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
    ],
)
def test_wrong_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(16, **sizes)
