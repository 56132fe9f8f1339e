"""Whole CLIPs against Hugging Face's, weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal.data import ImagePreprocess
from multimodal.models.clip import CLIP
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.hf_clip import to_hf
from tests.parity.clip import END, LENGTH, VOCAB, assert_logits, batch, randomize, tiny
from tests.parity.keys import assert_close

transformers = pytest.importorskip("transformers")


def build(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, **options: Any) -> Any:
    """A tiny `CLIPModel`."""
    small = {"num_hidden_layers": 2, "num_attention_heads": 2}
    seen = {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 4}
    read_ = {"hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": LENGTH, "vocab_size": VOCAB}
    config = transformers.CLIPConfig(
        vision_config={**small, **seen, **(vision or {})},
        text_config={**small, **read_, "eos_token_id": END, "bos_token_id": END - 1, **(text or {})},
        projection_dim=20,
        **options,
    )
    return randomize(transformers.CLIPModel(config))


@torch.no_grad()
def assert_same(ours: Any, theirs: Any, end: int = END) -> None:
    """Both towers, and the logits."""
    images, tokens = batch(end)
    assert isinstance(ours, CLIP)
    out, expected = ours(images, tokens), theirs(input_ids=tokens, pixel_values=images)
    assert_close(out.image_features, expected.image_embeds)
    assert_close(out.text_features, expected.text_embeds)
    assert_logits(out, expected.logits_per_image)
    assert_close(
        ours.vision_proj(ours.vision(images)), theirs.visual_projection(theirs.vision_model(images).pooler_output)
    )


CASES: list[tuple[dict[str, Any], int]] = [
    ({}, END),
    ({"vision": {"hidden_act": "gelu"}, "text": {"hidden_act": "gelu", "layer_norm_eps": 1e-4}}, END),
    ({"vision": {"hidden_act": "gelu_pytorch_tanh"}, "text": {"eos_token_id": 40}}, 40),
    ({"text": {"eos_token_id": 2}}, END),
]


@pytest.mark.parametrize(("options", "end"), CASES, ids=str)
def test_from_memory_and_from_its_folder(options: dict[str, Any], end: int, tmp_path: Path) -> None:
    module = build(**options)
    module.save_pretrained(tmp_path)
    for source in (module, tmp_path):
        loaded = load(source, task="clip")
        assert_same(loaded.model, module, end)
        assert (
            loaded.config["vision"]["activation"]
            == {
                "quick_gelu": "quick_gelu",
                "gelu": "gelu",
                "gelu_pytorch_tanh": "gelu_tanh",
            }[module.config.vision_config.hidden_act]
        )
        assert loaded.tokenizer is None


@pytest.mark.parametrize(("options", "end"), CASES[:3], ids=str)
def test_a_folder_comes_back_as_it_was(options: dict[str, Any], end: int, tmp_path: Path) -> None:
    module = build(**options)
    module.save_pretrained(tmp_path / "in")
    checkpoint = read(tmp_path / "in")
    to_hf(checkpoint, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back, info = transformers.CLIPModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert_same(load(module).model, back.eval(), end)
    assert read(tmp_path / "out").record() == checkpoint.record()


def test_the_folder_on_the_hub(tmp_path: Path) -> None:
    """Its config.json says things twice, in part as null, and older weights hold the numbers of their positions."""
    module = build()
    module.save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf |= {"text_config_dict": hf["text_config"], "vision_config_dict": None}
    hf["text_config"] = hf["text_config"] | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    state = load_file(tmp_path / "model.safetensors")
    for tower, count in (("text", LENGTH), ("vision", 17)):
        state[f"{tower}_model.embeddings.position_ids"] = torch.arange(count)[None]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same(load(tmp_path).model, module)


def test_the_published_config_without_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    save_file({"logit_scale": torch.tensor(1.0)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing text_model\.embeddings\.position_embedding\.weight, ") as caught:
        read(tmp_path)
    assert "text_model.encoder.layers.11.mlp.fc2.weight" in str(caught.value)


def test_preprocessing_travels(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    assert read(tmp_path).preprocess is None
    transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(
        tmp_path
    )
    published = read(tmp_path).preprocess
    assert published is not None
    assert ImagePreprocess.from_dict(published).to_dict() == published
    assert published == {
        "size": [16, 16],
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
        "interpolation": "bicubic",
        "crop_pct": 1.0,
        "crop_mode": "center",
    }
    for name, changes in {"center": {"crop_pct": 0.8}, "squash": {"crop_mode": "squash"}}.items():
        wanted = published | changes
        to_hf(Checkpoint.of("clip", load(tmp_path).model, preprocess=wanted), tmp_path / name)
        assert read(tmp_path / name).preprocess == wanted
        processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / name)
        seen = processor(torch.rand(3, 40, 30), do_rescale=False, return_tensors="pt")["pixel_values"]
        assert seen.shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["CLIPVisionModel"]}, "architecture 'CLIPVisionModel', expected 'CLIPModel'"),
        ({"vision_config": {"hidden_act": "mish"}}, "vision_config.hidden_act 'mish', expected one of gelu, "),
        ({"text_config": {"eos_token_id": [1, 2]}}, "end_token is [1, 2], expected int"),
        ({"text_config": {"eos_token_id": 99999}}, "end_token is 99999, expected in 1"),
        ({"vision_config": [3]}, "its JSON files do not describe a CLIP (TypeError("),
        ({"vision_config": {"hidden_size": 0}}, "its JSON files do not describe a CLIP (ZeroDivisionError("),
    ],
    ids=str,
)
def test_configs_that_are_not_covered(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"} | changes))
    with pytest.raises(ValueError, match=r".") as caught:
        read(tmp_path)
    assert message in str(caught.value), str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": -3.0}, "logit_bias -3.0"),
        ({"vision": {"pool": "mean", "pre_norm": False}}, "vision.pool 'mean', vision.pre_norm False"),
        ({"vision": {"image_size": (16, 8)}}, "vision.image_size (16, 8)"),
        ({"vision": {"conv_stem": True}}, "vision.conv_stem True"),
        ({"vision": {"layer_scale": 0.1}, "text": {"layer_scale": 0.2}}, "layer_scale 0.1, text.layer_scale 0.2"),
        ({"text": {"qk_norm": True}}, "text.qk_norm True"),
        ({"text": {"end_token": 2}}, "text.end_token 2"),
    ],
    ids=str,
)
def test_what_hf_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export to HF CLIP: that format cannot express ") as caught:
        to_hf(Checkpoint.of("clip", tiny(**changes)), tmp_path)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []
