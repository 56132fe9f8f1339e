"""open_clip's Transformer (causal and not, exact GELU and QuickGELU)."""

import pytest
import torch
from open_clip.transformer import QuickGELU, TextTransformer, Transformer, VisionTransformer
from torch import nn

from multimodal.blocks import Stack, StackConfig
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
    "ln_1": "self_attn_residual.norm",
    "attn.in_proj": qkv("self_attn"),
    "attn.out_proj": "self_attn.out_proj",
    "ls_1": "self_attn_residual.layer_scale",
    "ln_2": "mlp_residual.norm",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "ls_2": "mlp_residual.layer_scale",
}


@pytest.mark.parametrize("layer_scale", [None, 0.5])
@pytest.mark.parametrize(("activation", "act_layer"), [("gelu", nn.GELU), ("quick_gelu", QuickGELU)])
@pytest.mark.parametrize("causal", [False, True])
def test_transformer(causal: bool, activation: str, act_layer: type[nn.Module], layer_scale: float | None) -> None:
    theirs = randomize(Transformer(32, 3, 4, ls_init_value=layer_scale, act_layer=act_layer))
    config = StackConfig(
        embed_dim=32, depth=3, num_heads=4, activation=activation, layer_scale=layer_scale, final_norm=False
    )
    ours = Stack(config, causal=causal).eval()
    ours.load_state_dict(to_blocks(theirs.state_dict(), "resblocks", TABLE))
    x = torch.randn(2, 7, 32)
    mask = torch.full((7, 7), float("-inf")).triu(1) if causal else None

    actual, expected = ours(x).last, theirs(x, attn_mask=mask)
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, to_blocks(gradients(theirs), "resblocks", TABLE))


def test_initialisation() -> None:
    text = TextTransformer(width=128, heads=4, layers=2, vocab_size=8, context_length=4)
    image = VisionTransformer(32, 16, width=128, layers=2, heads=4, mlp_ratio=4)
    for theirs, init in ((text, "clip"), (image, "clip_vision")):
        ours = Stack(StackConfig(embed_dim=128, depth=2, num_heads=4, final_norm=False, init=init))
        assert_same_initialisation(ours, to_blocks(theirs.transformer.state_dict(), "resblocks", TABLE))
