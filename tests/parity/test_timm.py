"""timm's ViT block: layer scale, query and key norm, SwiGLU, drop path at inference."""

from functools import partial
from typing import Any

import pytest
import torch
from timm.layers import SwiGLU, resample_abs_pos_embed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from multimodal.blocks import Stack, StackConfig, resize_grid
from tests.parity.keys import (
    assert_close,
    assert_same_gradients,
    assert_same_initialisation,
    backward_alike,
    gradients,
    qkv,
    randomize,
    to_blocks,
)

TABLE = {
    "norm1": "self_attn_residual.norm",
    "attn.qkv": qkv("self_attn"),
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.proj": "self_attn.out_proj",
    "ls1": "self_attn_residual.layer_scale",
    "norm2": "mlp_residual.norm",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc1_x": "mlp.fc1",
    "mlp.fc1_g": "mlp.gate",
    "mlp.fc2": "mlp.fc2",
    "ls2": "mlp_residual.layer_scale",
}


@pytest.mark.parametrize(
    ("published", "fields"),
    [
        ({}, {}),
        ({"qkv_bias": False}, {"qkv_bias": False}),
        ({"init_values": 0.1, "drop_path": 0.3}, {"layer_scale": 0.1, "drop_path": (0.3, 0.3)}),
        ({"qk_norm": True}, {"qk_norm": True}),
        (
            {"mlp_layer": SwiGLU, "act_layer": nn.SiLU, "mlp_ratio": 2.5},
            {"gated": True, "activation": "silu", "mlp_ratio": 2.5},
        ),
    ],
    ids=["plain", "no qkv bias", "layer scale, drop path", "qk norm", "SwiGLU"],
)
def test_blocks(published: dict[str, Any], fields: dict[str, Any]) -> None:
    build = partial(Block, 32, 4, norm_layer=partial(nn.LayerNorm, eps=1e-6), **{"qkv_bias": True, **published})
    theirs = randomize(nn.Sequential(build(), build()))
    ours = Stack(StackConfig(embed_dim=32, depth=2, num_heads=4, norm_eps=1e-6, final_norm=False, **fields)).eval()
    ours.load_state_dict(to_blocks({f"blocks.{k}": v for k, v in theirs.state_dict().items()}, "blocks", TABLE))
    x = torch.randn(2, 9, 32)

    actual, expected = ours(x).last, theirs(x)
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, to_blocks({f"blocks.{k}": v for k, v in gradients(theirs).items()}, "blocks", TABLE))


def test_initialisation() -> None:
    theirs = VisionTransformer(img_size=16, embed_dim=128, depth=2, num_heads=4, qk_norm=True, init_values=0.1)
    fields = {"qk_norm": True, "layer_scale": 0.1, "final_norm": False}
    ours = Stack(StackConfig(embed_dim=128, depth=2, num_heads=4, **fields))
    assert_same_initialisation(ours, to_blocks(theirs.state_dict(), "blocks", TABLE))


@pytest.mark.parametrize(("old", "new"), [((4, 6), (7, 3)), ((6, 4), (3, 2)), ((5, 5), (10, 10))])
def test_resample_positions(old: tuple[int, int], new: tuple[int, int]) -> None:
    position = torch.randn(1, 2 + old[0] * old[1], 8)
    expected = resample_abs_pos_embed(position, list(new), list(old), num_prefix_tokens=2)
    assert_close(resize_grid(position, old, new, prefix=2), expected)
