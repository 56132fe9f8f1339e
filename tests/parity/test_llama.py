"""HF Llama (rotary in halves, RMSNorm, grouped heads, SwiGLU, no biases), and GPT-J's interleaved rotary layout."""

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaModel
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

from multimodal.blocks import RotaryPosition, Stack, StackConfig
from tests.parity.keys import (
    assert_close,
    assert_same_gradients,
    backward_alike,
    final_norm,
    gradients,
    randomize,
    to_blocks,
)

TABLE = {
    "input_layernorm": "self_attn_residual.norm",
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"},
    "self_attn.o_proj": "self_attn.out_proj",
    "post_attention_layernorm": "mlp_residual.norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def models() -> tuple[Stack, LlamaModel]:
    published = LlamaConfig(
        vocab_size=11, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
        intermediate_size=48, rms_norm_eps=1e-6, rope_theta=500.0, max_position_embeddings=16,
    )  # fmt: skip
    config = StackConfig(
        embed_dim=32, depth=2, num_heads=4, num_kv_heads=2, head_dim=10, mlp_ratio=1.5, activation="silu", gated=True,
        norm="rms", norm_eps=1e-6, qkv_bias=False, out_bias=False, mlp_bias=False, rope="half", rope_base=500.0,
    )  # fmt: skip
    theirs = randomize(LlamaModel(published))
    ours = Stack(config, causal=True).eval()
    ours.load_state_dict(to_blocks(theirs.state_dict(), "layers", TABLE) | final_norm(theirs.state_dict(), "norm"))
    return ours, theirs


def test_padded_batch() -> None:
    ours, theirs = models()
    key_mask = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    x = torch.randn(2, 9, 32)
    actual = ours(x, key_mask=key_mask).last
    expected = theirs(inputs_embeds=x, attention_mask=key_mask.long()).last_hidden_state
    assert_close(actual, expected)
    backward_alike(actual, expected)
    theirs_gradients = gradients(theirs)
    converted = to_blocks(theirs_gradients, "layers", TABLE) | final_norm(theirs_gradients, "norm")
    assert_same_gradients(ours, converted)


@torch.no_grad()
def test_cached() -> None:
    """Rotary angles go on from the cache's length, for a step and for a chunk."""
    ours, theirs = models()
    x = torch.randn(2, 9, 32)
    cache, published_cache = ours.make_cache(9), None
    for start, end in ((0, 4), (4, 5), (5, 9)):
        out = theirs(inputs_embeds=x[:, start:end], use_cache=True, cache=published_cache)
        published_cache = out.cache
        assert_close(ours(x[:, start:end], cache=cache).last, out.last_hidden_state)


@pytest.mark.parametrize("offset", [0, 5])
def test_interleaved(offset: int) -> None:
    q = torch.randn(2, 3, 7, 8)
    sin, cos = create_sinusoidal_positions(20, 8)[None, offset : offset + 7].chunk(2, dim=-1)
    turn = partial(apply_rotary_pos_emb, sin=sin, cos=cos)
    rope = RotaryPosition(8, layout="interleaved")(7, offset)
    assert_close(rope.turn_query(q), turn(q.transpose(1, 2)).transpose(1, 2))
    assert_close(rope.turn_key(q), turn(q.transpose(1, 2)).transpose(1, 2))
