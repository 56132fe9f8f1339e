"""Which models of timm can be a backbone, and the map that each gives."""

import re
from typing import Any

import pytest
import torch

from multimodal.blocks.backbone import build_backbone


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "stride"),
    [
        ({"name": "resnet18"}, 32),
        ({"name": "resnet18", "stage": -2}, 16),
        ({"name": "resnet18", "dilation": True}, 16),
        ({"name": "mobilenetv3_small_050"}, 32),
        ({"name": "conv"}, 8),
    ],
)
def test_a_map_of_any_image(options: dict[str, Any], stride: int) -> None:
    backbone = build_backbone(**options).eval()
    for height, width in ((64, 96), (33, 70), (1, 1)):
        features = backbone(torch.randn(2, 3, height, width))
        assert features.shape == (2, backbone.channels, -(-height // stride), -(-width // stride))
        assert features.isfinite().all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "nosuchnet"}, "'nosuchnet' is not to be had from timm: Unknown model (nosuchnet)"),
        ({"name": "vit_tiny_patch16_224"}, "'vit_tiny_patch16_224' does not take images of any size: Input height"),
        ({"name": "conv", "stage": -2}, "'conv' has one feature map: dilation False, stage -2, expected false and -1"),
        ({"name": "resnet18", "stage": -9}, "'resnet18' has fewer feature maps"),
    ],
)
def test_what_cannot_be_a_backbone_is_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^(backbone_stage is -9, but )?backbone {re.escape(expected)}.*$") as raised:
        build_backbone(**options)
    assert "\n" not in str(raised.value)
