"""A model at another image size than its weights were trained at."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint, load, save

PREFIXES: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"num_registers": 3},
    "registers without positions": {"num_registers": 3, "prefix_position": False},
    "no class token": {"class_token": False, "pool": "mean"},
    "distilled": {"distilled": True},
}


def small(**options: Any) -> ViT:
    return ViT(ViTConfig(**({"embed_dim": 8, "depth": 1, "num_heads": 1, "patch_size": 2, "num_classes": 3} | options)))


def test_every_multiple_of_the_patch_size() -> None:
    source, model = small(image_size=(28, 28)), small()
    state = source.state_dict()
    for height, width in itertools.product(range(1, 41), repeat=2):
        model.config = replace(source.config, image_size=(2 * height, 2 * width))  # building each would take minutes
        adapted = model.adapt_state_dict(state, source.config)
        assert adapted["position"].shape == (1 + height * width, 8)
        assert adapted["position"].isfinite().all()
        assert torch.equal(adapted["position"][0], state["position"][0])


@pytest.mark.parametrize("size", [(2, 2), (2, 80), (80, 2), (14, 30), (54, 52), (80, 80)])
def test_the_resized_model_runs(size: tuple[int, int], tmp_path: Any) -> None:
    for options in PREFIXES.values():
        path = tmp_path / "model.safetensors"
        preprocess = {"size": [28, 28], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9}
        save(path, Checkpoint.of("vit", small(image_size=28, **options), preprocess=preprocess))
        loaded = load(path, changes={"image_size": size})
        assert loaded.model(torch.randn(1, 3, *size)).shape == (1, 3)
        assert loaded.model.config.image_hw == size
        assert loaded.config["image_size"] == list(size)
        assert loaded.preprocess == {**preprocess, "size": list(size)}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("old", "new"), [((224, 224), (384, 384)), ((384, 384), (224, 224)), ((64, 96), (96, 64)), ((64, 96), (160, 96))]
)
def test_positions_are_those_of_timm(prefix: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    options = {"patch_size": 16, **PREFIXES[prefix]}
    source, model = small(image_size=old, **options), small(image_size=new, **options)
    mine = model.adapt_state_dict(source.state_dict(), source.config)["position"]
    rows = source.config.num_prefix if source.config.prefix_position else 0
    theirs = resample_abs_pos_embed(
        source.position[None], list(model.config.grid), list(source.config.grid), num_prefix_tokens=rows
    )[0]
    assert (mine - theirs).abs().max() <= 1e-6
    assert mine.shape == model.position.shape


def test_the_same_size_changes_nothing(tmp_path: Any) -> None:
    source = small(image_size=(4, 6))
    save(tmp_path / "a.safetensors", Checkpoint.of("vit", source))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(tmp_path / "a.safetensors", changes={"image_size": (4, 6), "drop_path": 0.1}).model
    assert torch.equal(model.position, source.position)
    turned = load(tmp_path / "a.safetensors", changes={"image_size": (6, 4)}).model  # as many patches, another grid
    assert not torch.equal(turned.position, source.position)
