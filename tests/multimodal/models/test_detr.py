"""A DETR of each kind: its config, its outputs, and what may not influence them."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.blocks import StackConfig
from multimodal.blocks.queries import Noised
from multimodal.models.detr import DETR, DETRConfig, DETRLayers, DETROutput

STACK = StackConfig(embed_dim=16, depth=2, num_heads=2)
TINY: dict[str, Any] = {"num_classes": 3, "num_queries": 4, "backbone": "conv", "encoder": STACK, "decoder": STACK}
KINDS: list[dict[str, Any]] = [
    {"queries": "learned"},
    {"queries": "learned", "scores": "sigmoid"},
    {"queries": "boxes", "scores": "sigmoid", "denoising": 6},
    {"queries": "boxes", "modulated": True, "denoising": 6},
    {"queries": "proposed", "denoising": 6},
    {"queries": "proposed", "scores": "sigmoid", "modulated": True, "denoising": 6},
]
NAMES = ["-".join(map(str, kind.values())) for kind in KINDS]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)
denoised = pytest.mark.parametrize("kind", KINDS[2:], ids=NAMES[2:])


def build(**options: Any) -> DETR:
    """In evaluation mode, with heads that tell tokens apart, as after training."""
    model = DETR(DETRConfig(**(TINY | options)))
    for name, parameter in model.named_parameters():
        if name.endswith(("box_head.layers.2.weight", "to_shape.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_classes": 0}, "num_classes is 0, expected at least 1"),
        ({"num_queries": 0}, "num_queries is 0, expected at least 1"),
        ({"denoising": -1, "queries": "boxes"}, "denoising is -1, expected at least 0"),
        ({"denoising": 5}, "denoising is 5 with queries 'learned', expected boxes or proposed"),
        ({"backbone_stage": 0}, "backbone_stage is 0, expected -1 (the coarsest map), -2, …"),
        ({"modulated": True}, "modulated is True with queries 'learned', expected boxes or proposed"),
        (
            {"encoder": StackConfig(embed_dim=32, num_heads=2)},
            "encoder.embed_dim is 32 and decoder.embed_dim 16, expected the same",
        ),
        (
            {"decoder": StackConfig(embed_dim=16, num_heads=2, rope="half")},
            "decoder.rope is 'half', expected null: queries have no order",
        ),
        (
            {side: StackConfig(embed_dim=30, num_heads=2) for side in ("encoder", "decoder")},
            "decoder.embed_dim is 30, expected a multiple of 4",
        ),
    ],
)
def test_a_config_that_cannot_be_is_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        DETRConfig(**(TINY | options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"backbone_stage": -2},
            "backbone 'conv' has one feature map: dilation False, stage -2, expected false and -1",
        ),
        ({"dilation": True}, "backbone 'conv' has one feature map: dilation True, stage -1, expected false and -1"),
    ],
)
def test_the_small_backbone_has_one_map(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        build(**options)


@torch.no_grad()
@kinds
def test_shapes(kind: dict[str, Any]) -> None:
    model = build(**kind)
    outputs = 3 if kind.get("scores") == "sigmoid" else 4
    images = torch.randn(2, 3, 40, 24)
    found: DETROutput = model(images)
    assert found.logits.shape == (2, 4, outputs)
    assert found.boxes.shape == (2, 4, 4)
    assert ((found.boxes >= 0) & (found.boxes <= 1)).all()
    layers: DETRLayers = model(images, all_layers=True)
    assert layers.logits.shape == (2, 2, 4, outputs)
    assert layers.boxes.shape == (2, 2, 4, 4)
    assert (layers.proposals is not None) == (kind["queries"] == "proposed")
    if layers.proposals is not None:
        assert [tuple(part.shape) for part in layers.proposals] == [(2, 15, outputs), (2, 15, 4), (2, 15, 2)]
    assert torch.equal(layers.logits[-1], found.logits)
    assert torch.equal(layers.boxes[-1], found.boxes)


@torch.no_grad()
@kinds
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (8, 8)])
def test_an_image_of_a_few_pixels(kind: dict[str, Any], size: tuple[int, int]) -> None:
    """Fewer tokens than queries."""
    found: DETROutput = build(**kind)(torch.randn(1, 3, *size))
    assert found.boxes.shape == (1, 4, 4)
    assert all(part.isfinite().all() for part in found)


@torch.no_grad()
@kinds
def test_no_mask_is_a_mask_without_padding(kind: dict[str, Any]) -> None:
    model, images = build(**kind), torch.randn(2, 3, 40, 24)
    expected = model(images)
    for part, wanted in zip(model(images, torch.ones(2, 40, 24, dtype=torch.bool)), expected, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@kinds
def test_what_the_encoder_makes_of_padding_is_not_read(kind: dict[str, Any]) -> None:
    model, images = build(**kind), torch.randn(2, 3, 40, 32)
    valid = torch.ones(2, 40, 32, dtype=torch.bool)
    valid[1, 24:], valid[1, :, 16:] = False, False
    memory, real = model.encode(images * valid[:, None], valid)
    assert real.sum((1, 2)).tolist() == [20, 6]
    expected = model.decode(memory, real)
    spoiled = memory.where(real.flatten(1)[..., None], 100 * torch.randn_like(memory))
    for part, wanted in zip(model.decode(spoiled, real), expected, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-5)


def noise() -> Noised:
    """Two groups of three noised boxes, of which the second image has two, and a mask as training makes it."""
    count, own = 6, 4
    mask = torch.zeros(count + own, count + own, dtype=torch.bool)
    for query in range(count + own):
        for key in range(count + own):
            mask[query, key] = key >= count or (query < count and query // 3 == key // 3)
    real = torch.ones(2, count, dtype=torch.bool)
    real[1, [2, 5]] = False
    return Noised(torch.randint(3, (2, count)), torch.rand(2, count, 4) * 0.9 + 0.05, real, mask[None, None])


def layers(model: DETR, images: Tensor, noised: Noised | None) -> tuple[Tensor, Tensor]:
    found: DETRLayers = model(images, None, noised, all_layers=True)
    return found.logits, found.boxes


@torch.no_grad()
@denoised
def test_noised_boxes_do_not_influence_the_own_queries(kind: dict[str, Any]) -> None:
    model, images = build(**kind), torch.randn(2, 3, 40, 24)
    for part, wanted in zip(layers(model, images, noise()), layers(model, images, None), strict=True):
        assert part.shape[2] == 10
        torch.testing.assert_close(part[:, :, 6:], wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@denoised
def test_a_group_does_not_see_another_but_its_own_and_never_what_is_none(kind: dict[str, Any]) -> None:
    model, images, noised = build(**kind), torch.randn(2, 3, 40, 24), noise()
    before = layers(model, images, noised)
    labels, boxes = noised.labels.clone(), noised.boxes.clone()
    labels[:, 3], boxes[:, 3] = (labels[:, 3] + 1) % 3, 1 - boxes[:, 3]
    for part, wanted in zip(layers(model, images, noised._replace(labels=labels, boxes=boxes)), before, strict=True):
        assert torch.equal(part[:, :, :3], wanted[:, :, :3])
        assert not torch.isclose(part[-1, :, 4], wanted[-1, :, 4], rtol=0, atol=1e-7).all()
    labels, boxes = noised.labels.clone(), noised.boxes.clone()
    labels[1, 2], boxes[1, 2] = (labels[1, 2] + 1) % 3, 1 - boxes[1, 2]
    for part, wanted in zip(layers(model, images, noised._replace(labels=labels, boxes=boxes)), before, strict=True):
        others = [index for index in range(10) if index != 2]
        assert torch.equal(part[:, 1, others], wanted[:, 1, others])


@torch.no_grad()
def test_each_layer_refines_the_boxes_of_the_one_before() -> None:
    model = DETR(DETRConfig(**(TINY | {"queries": "boxes"}))).eval()  # before training a refinement is no change
    found: DETRLayers = model(torch.randn(2, 3, 40, 24), all_layers=True)
    assert not isinstance(model.queries.boxes, torch.nn.Module)
    assert model.queries.boxes is not None
    start = model.queries.boxes.sigmoid().expand(2, 2, -1, -1)
    torch.testing.assert_close(found.boxes, start)
