"""torch.nn.TransformerEncoder, TransformerDecoder and MultiheadAttention."""

import pytest
import torch
from torch import Tensor, nn

from multimodal.attention import Attention
from multimodal.blocks import Stack, StackConfig
from tests.parity.keys import (
    assert_close,
    assert_same_gradients,
    backward_alike,
    final_norm,
    gradients,
    qkv,
    randomize,
    to_blocks,
)

ENCODER = {
    "self_attn.in_proj": qkv("self_attn"),
    "self_attn.out_proj": "self_attn.out_proj",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
    "norm1": "self_attn_residual.norm",
    "norm2": "mlp_residual.norm",
}
DECODER = {
    **ENCODER,
    "multihead_attn.in_proj": qkv("cross_attn"),
    "multihead_attn.out_proj": "cross_attn.out_proj",
    "norm2": "cross_attn_residual.norm",
    "norm3": "mlp_residual.norm",
}
LENGTH, CONTEXT = 6, 5
both_orders = pytest.mark.parametrize("norm_first", [True, False])
both_activations = pytest.mark.parametrize("activation", ["relu", "gelu"])


def config(norm_first: bool, activation: str) -> StackConfig:
    order = "pre" if norm_first else "post"
    return StackConfig(
        embed_dim=32, depth=2, num_heads=4, mlp_ratio=2, activation=activation, norm_order=order, final_norm=norm_first
    )


def convert(state: dict[str, Tensor], table: dict[str, str | tuple[str, ...]]) -> dict[str, Tensor]:
    return to_blocks(state, "layers", table) | final_norm(state, "norm")


def padding(length: int, valid: int) -> Tensor:
    """[2, length], True = a real token; the second row has `valid` of them."""
    return torch.arange(length) < torch.tensor([[length], [valid]])


@pytest.mark.parametrize("causal", [True, False])
@both_activations
@both_orders
def test_encoder(norm_first: bool, activation: str, causal: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation, batch_first=True, norm_first=norm_first)
    norm = nn.LayerNorm(32) if norm_first else None
    theirs = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    randomize(theirs).train()  # its fast path at inference is another implementation
    ours = Stack(config(norm_first, activation), causal=causal)
    ours.load_state_dict(convert(theirs.state_dict(), ENCODER))
    x, valid = torch.randn(2, LENGTH, 32), padding(LENGTH, 4)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if causal else None

    actual, expected = ours(x, key_mask=valid).last, theirs(x, mask=mask, src_key_padding_mask=~valid)
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, convert(gradients(theirs), ENCODER))


@both_activations
@both_orders
def test_decoder(norm_first: bool, activation: str) -> None:
    """Causal, and both the tokens and the context padded."""
    layer = nn.TransformerDecoderLayer(32, 4, 64, 0.0, activation, batch_first=True, norm_first=norm_first)
    theirs = randomize(nn.TransformerDecoder(layer, 2, nn.LayerNorm(32) if norm_first else None))
    ours = Stack(config(norm_first, activation), causal=True, context_dim=32)
    ours.load_state_dict(convert(theirs.state_dict(), DECODER))
    x, context = torch.randn(2, LENGTH, 32), torch.randn(2, CONTEXT, 32)
    valid, context_valid = padding(LENGTH, 4), padding(CONTEXT, 3)

    actual = ours(x, context, key_mask=valid, context_key_mask=context_valid).last
    expected = theirs(
        x,
        context,
        tgt_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1),
        tgt_key_padding_mask=~valid,
        memory_key_padding_mask=~context_valid,
    )
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, convert(gradients(theirs), DECODER))


@pytest.mark.parametrize("kernel", ["naive", "sdpa"])
def test_multihead_attention(kernel: str) -> None:
    """Cross-attention with keys of another width and a mask for each pair; torch's True = ignore."""
    theirs = randomize(nn.MultiheadAttention(32, 4, kdim=12, vdim=12, batch_first=True))
    ours = Attention(32, 4, context_dim=12, kernel=kernel)
    state = theirs.state_dict()
    biases = dict(zip("qkv", state["in_proj_bias"].chunk(3), strict=True))
    ours.load_state_dict(
        {f"{part}_proj.weight": state[f"{part}_proj_weight"] for part in "qkv"}
        | {f"{part}_proj.bias": bias for part, bias in biases.items()}
        | {f"out_proj.{kind}": state[f"out_proj.{kind}"] for kind in ("weight", "bias")}
    )
    x, context = torch.randn(2, LENGTH, 32), torch.randn(2, CONTEXT, 12)
    mask = torch.rand(2, 4, LENGTH, CONTEXT) < 0.7
    mask[..., 0] = True  # torch's own gives NaN for a query without keys

    actual, weights = ours(x, context, mask=mask, need_weights=True)
    expected, expected_weights = theirs(x, context, context, attn_mask=~mask.flatten(0, 1), average_attn_weights=False)
    assert_close(actual, expected)
    assert_close(weights, expected_weights)
    assert_close(ours(x, context, mask=mask)[0], expected)
