"""DETR's encoder and decoder, from outputs recorded with facebookresearch/detr on a padded batch.

In its code a mask is True on padding and tokens come first; both are turned here, at the door.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from multimodal.blocks import Stack, StackConfig, sine_2d
from tests.parity.keys import assert_close, assert_same_initialisation, final_norm, qkv, to_blocks

TABLE = {
    "self_attn.in_proj": qkv("self_attn"),
    "self_attn.out_proj": "self_attn.out_proj",
    "multihead_attn.in_proj": qkv("cross_attn"),
    "multihead_attn.out_proj": "cross_attn.out_proj",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
}
ENCODER = {**TABLE, "norm1": "self_attn_residual.norm", "norm2": "mlp_residual.norm"}
DECODER = {**ENCODER, "norm2": "cross_attn_residual.norm", "norm3": "mlp_residual.norm"}


class Recorded:
    """What facebookresearch/detr was given, its weights, and what it returned."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
            self.config: dict[str, Any] = json.loads(file.metadata()["config"])
        self.valid = ~self["input.pad_mask"]
        self.state = {key.removeprefix("state."): t for key, t in self.tensors.items() if key.startswith("state.")}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])


@pytest.fixture(scope="module")
def recorded(shared: Path) -> Recorded:
    return Recorded(shared / "oracles" / "detr_facebook.safetensors")


def build(recorded: Recorded, side: str) -> Stack:
    config, decoder = recorded.config, side == "decoder"
    ours = Stack(
        StackConfig(
            embed_dim=config["d_model"],
            depth=config["dec_layers" if decoder else "enc_layers"],
            num_heads=config["nhead"],
            mlp_ratio=config["dim_feedforward"] / config["d_model"],
            activation="relu",
            norm_order="post",
            final_norm=decoder,
            init="detr",
        ),
        context_dim=config["d_model"] if decoder else None,
    )
    weights = to_blocks(recorded.state, f"transformer.{side}.layers", DECODER if decoder else ENCODER)
    ours.load_state_dict(weights | final_norm(recorded.state, f"transformer.{side}.norm"))
    return ours.eval()


def test_sine_2d(recorded: Recorded) -> None:
    assert_close(sine_2d(recorded.valid, 64), recorded["output.position"].flatten(2).transpose(1, 2))


@torch.no_grad()
def test_encoder(recorded: Recorded) -> None:
    assert not recorded.valid.all()
    features = recorded["input.features"].flatten(2).transpose(1, 2)
    weight, bias = recorded.state["input_proj.weight"].flatten(1), recorded.state["input_proj.bias"]
    out = build(recorded, "encoder")(
        F.linear(features, weight, bias),
        pos=recorded["output.position"].flatten(2).transpose(1, 2),
        key_mask=recorded.valid.flatten(1),
        need_layers=(0, 1),
    )
    for i, layer in enumerate(out.layers):
        assert_close(layer, recorded[f"output.encoder.{i}"])
    assert_close(out.last, recorded["output.memory"].flatten(2).transpose(1, 2))


@torch.no_grad()
def test_decoder(recorded: Recorded) -> None:
    """The norm acts on every layer's output and is not fed back; logits and boxes come from all layers."""
    decoder = build(recorded, "decoder")
    queries = recorded.state["query_embed.weight"]
    out = decoder(
        queries.new_zeros(3, *queries.shape),
        recorded["output.memory"].flatten(2).transpose(1, 2),
        pos=queries[None],
        context_pos=recorded["output.position"].flatten(2).transpose(1, 2),
        context_key_mask=recorded.valid.flatten(1),
        need_layers=range(3),
    )
    hidden = torch.stack([decoder.norm(layer) for layer in out.layers])
    assert_close(hidden, recorded["output.hidden"])
    assert_close(out.last, recorded["output.hidden"][-1])
    assert_close(recorded.linear("class_embed", hidden), recorded["output.logits"])
    box = hidden
    for i in range(2):
        box = recorded.linear(f"bbox_embed.layers.{i}", box).relu()
    assert_close(recorded.linear("bbox_embed.layers.2", box).sigmoid(), recorded["output.boxes"])


def test_initialisation() -> None:
    """DETR's layers are torch's, and its `_reset_parameters` is this loop."""
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(128, 4, 512), 2)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    config = StackConfig(embed_dim=128, depth=2, num_heads=4, final_norm=False, init="detr")
    assert_same_initialisation(Stack(config, context_dim=128), to_blocks(theirs.state_dict(), "layers", DECODER))
