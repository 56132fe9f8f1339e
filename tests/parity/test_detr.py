"""A DETR without its backbone, matching, losses and post-processing, from what facebookresearch/detr recorded.

The batch is padded. In the original code a mask is True on padding and tokens come first; both are turned here.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from multimodal.blocks import Stack, StackConfig, sine_2d
from multimodal.models.detr import DETR, LAYERS, DETRConfig, DETROutput
from multimodal.pretrained.fb_detr import rules
from multimodal.pretrained.keymap import KeyMap
from tasks.detr.criterion import SetCriterion, cardinality_error, class_error
from tasks.detr.matcher import HungarianMatcher, Pairs, Targets
from tasks.detr.postprocess import detections
from tests.parity.keys import assert_close, assert_same_initialisation, qkv, to_blocks

DECODER = {
    "self_attn.in_proj": qkv("self_attn"),
    "self_attn.out_proj": "self_attn.out_proj",
    "multihead_attn.in_proj": qkv("cross_attn"),
    "multihead_attn.out_proj": "cross_attn.out_proj",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
    "norm1": "self_attn_residual.norm",
    "norm2": "cross_attn_residual.norm",
    "norm3": "mlp_residual.norm",
}


class Recorded:
    """What facebookresearch/detr was given, its weights, and what it returned."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, "pt") as file:
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a dict
            self.config: dict[str, Any] = json.loads(file.metadata()["config"])
            self.losses: dict[str, float] = json.loads(file.metadata()["losses"])
        self.valid = ~self["input.pad_mask"]
        self.state = {key.removeprefix("state."): t for key, t in self.tensors.items() if key.startswith("state.")}

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    @property
    def targets(self) -> Targets:
        images = range(len(self.valid))
        labels = nn.utils.rnn.pad_sequence([self[f"target.{i}.labels"] for i in images], True, -1)
        boxes = nn.utils.rnn.pad_sequence([self[f"target.{i}.boxes"] for i in images], True)
        return Targets(labels, boxes, torch.zeros_like(labels, dtype=torch.bool))

    def losses_of(self, name: str) -> Tensor:
        """The losses of each layer: the last one's has no number."""
        auxiliary = [self.losses[f"{name}_{i}"] for i in range(self.config["dec_layers"] - 1)]
        return torch.tensor([*auxiliary, self.losses[name]])


@pytest.fixture(scope="module")
def recorded(shared: Path) -> Recorded:
    return Recorded(shared / "oracles" / "detr_facebook.safetensors")


@pytest.fixture(scope="module")
def model(recorded: Recorded) -> DETR:
    """The recorded model, without a backbone: what was recorded are features."""
    config = recorded.config
    layers = {
        **LAYERS,
        "embed_dim": config["d_model"],
        "num_heads": config["nhead"],
        "mlp_ratio": config["dim_feedforward"] / config["d_model"],
    }
    ours = DETRConfig(
        num_classes=config["num_classes"],
        num_queries=config["num_queries"],
        backbone="conv",
        encoder=StackConfig(**(layers | {"depth": config["enc_layers"]}), final_norm=False),
        decoder=StackConfig(**(layers | {"depth": config["dec_layers"]})),
    )
    model = DETR(ours)
    model.backbone = nn.Identity()
    model.input_proj = nn.Conv2d(config["backbone_channels"], config["d_model"], 1)
    model.load_state_dict(KeyMap(rules(ours), model.state_dict()).to_ours(recorded.state, "recorded"))
    return model.eval()


@pytest.fixture(scope="module")
def output(recorded: Recorded, model: DETR) -> DETROutput:
    """What all layers find."""
    with torch.no_grad():
        return model(recorded["input.features"], recorded.valid, all_layers=True)


@pytest.fixture(scope="module")
def pairs(recorded: Recorded, output: DETROutput) -> Pairs:
    return HungarianMatcher()(output, recorded.targets)


@torch.no_grad()
def test_hidden_states(recorded: Recorded, model: DETR) -> None:
    """The decoder's norm acts on every layer's output and is not fed back."""
    assert not recorded.valid.all()
    layers: list[Tensor] = []
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    hooks = [block.register_forward_hook(lambda *call: layers.append(call[-1].tokens)) for block in blocks]
    memory, valid = model.encode(recorded["input.features"], recorded.valid)
    model.decode(memory, valid)
    for hook in hooks:
        hook.remove()
    assert torch.equal(valid, recorded.valid)
    assert_close(sine_2d(valid, memory.shape[-1]), recorded["output.position"].flatten(2).transpose(1, 2))
    assert_close(memory, recorded["output.memory"].flatten(2).transpose(1, 2))
    encoder, decoder = layers[: len(model.encoder.blocks)], layers[len(model.encoder.blocks) :]
    for i, layer in enumerate(encoder):
        assert_close(layer, recorded[f"output.encoder.{i}"])
    assert_close(torch.stack([model.decoder.norm(layer) for layer in decoder]), recorded["output.hidden"])


@torch.no_grad()
def test_outputs(recorded: Recorded, model: DETR, output: DETROutput) -> None:
    assert_close(output.logits, recorded["output.logits"])
    assert_close(output.boxes, recorded["output.boxes"])
    last = model(recorded["input.features"], recorded.valid)
    assert torch.equal(last.logits, output.logits[-1])
    assert torch.equal(last.boxes, output.boxes[-1])


def test_matching(recorded: Recorded, pairs: Pairs) -> None:
    last, count = recorded.config["dec_layers"] - 1, 0
    for layer in range(last + 1):
        for image in range(len(recorded.valid)):
            key = f"output.match.{image}" if layer == last else f"output.match_aux.{layer}.{image}"
            chosen = (pairs.layer == layer) & (pairs.image == image)
            assert torch.equal(pairs.query[chosen], recorded[f"{key}.query"])
            assert torch.equal(pairs.target[chosen], recorded[f"{key}.target"])
            count += int(chosen.sum())
    assert count == len(pairs.layer) > 0


def test_losses(recorded: Recorded, output: DETROutput, pairs: Pairs) -> None:
    targets = recorded.targets
    losses = SetCriterion()(output, targets, pairs)
    for name, values in losses.items():
        assert_close(values, recorded.losses_of(name))
    found = cardinality_error(output.logits, targets, "softmax")
    assert_close(found, recorded.losses_of("cardinality_error"))
    assert_close(class_error(output.logits, targets, pairs), torch.tensor(recorded.losses["class_error"]))
    weights = recorded.config["weights"]
    expected = sum(weight * recorded.losses_of(name).sum() for name, weight in weights.items())
    assert_close(SetCriterion().total(losses), expected)


def test_detections(recorded: Recorded, output: DETROutput) -> None:
    last = DETROutput(output.logits[-1], output.boxes[-1])
    for image, found in enumerate(detections(last, recorded["input.sizes"])):
        for name, value in found.items():
            assert_close(value, recorded[f"output.post.{image}.{name}"])


def test_initialisation() -> None:
    """DETR's layers are torch's, and its `_reset_parameters` is this loop."""
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(128, 4, 512), 2)
    for parameter in theirs.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    config = StackConfig(embed_dim=128, depth=2, num_heads=4, final_norm=False, init="detr")
    assert_same_initialisation(Stack(config, context_dim=128), to_blocks(theirs.state_dict(), "layers", DECODER))
