"""Folders for timm: each covered architecture goes out, and timm makes the same model of it by itself."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from multimodal.pretrained import load, read
from multimodal.pretrained.timm_folder import write_folder
from tests.parity.test_timm_vit import NAMES, REASON, assert_equal, assert_same_weights, shrunken, stirred


def _exported(module: Any, folder: Path) -> Any:
    write_folder(read(module), folder)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REASON])
def test_timm_loads_what_it_once_gave(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        full: Any = timm.create_model(name, depth=1)
    module = shrunken(name, full.patch_embed.patch_size)
    again = _exported(module, tmp_path)
    assert_same_weights(again.state_dict(), module)
    x = torch.randn(2, 3, *module.patch_embed.img_size)
    with torch.no_grad():
        assert_equal(again(x), module(x))


@pytest.mark.parametrize("ratio", [55 / 784, 2.0001])
def test_a_hidden_width_that_rounding_would_lose(ratio: float, tmp_path: Path) -> None:
    module = stirred(timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=784, num_heads=2, img_size=32))
    module.blocks[0].mlp = timm.layers.Mlp(784, hidden_features=round(784 * ratio))
    again = _exported(module, tmp_path)
    assert again.blocks[0].mlp.fc1.out_features == round(784 * ratio)


def test_other_classes_and_channels_can_be_asked_of_the_folder(tmp_path: Path) -> None:
    module = shrunken("vit_tiny_patch16_224", (16, 16))
    write_folder(read(module), tmp_path)
    fresh = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=7, in_chans=1)
    assert fresh.head.out_features == 7
    assert torch.equal(fresh.blocks[0].attn.qkv.weight, module.blocks[0].attn.qkv.weight)
    assert torch.allclose(fresh.patch_embed.proj.weight, module.patch_embed.proj.weight.sum(1, keepdim=True))


def test_what_is_read_back_is_the_same_config(tmp_path: Path) -> None:
    module = shrunken("vit_base_patch14_reg4_dinov2", (14, 14))
    write_folder(read(module), tmp_path)
    assert load(tmp_path).config == load(module).config
