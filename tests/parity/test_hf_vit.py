"""Whole Vision Transformers against Hugging Face's, weights in and out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from multimodal.models.vit import ViT
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.hf_vit import to_hf

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 120,
    "image_size": [32, 48],
    "patch_size": 8,
}


def build(cls: Any, **options: Any) -> Any:
    """A model in evaluation mode, no weight of which is a special number such as 0 or 1."""
    model = cls(transformers.ViTConfig(**(SMALL | options))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def classifier(**options: Any) -> Any:
    return build(transformers.ViTForImageClassification, **({"num_labels": 5} | options))


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error, bound = (ours - theirs).abs().max().item(), 1e-5 * max(1.0, theirs.abs().max().item())
    assert error <= bound, f"{error} > {bound}"


def images(model: ViT) -> Tensor:
    return torch.randn(2, model.config.in_channels, *model.config.image_hw)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": False},
        {"num_channels": 1},
        {"num_labels": 0},
        {"patch_size": [8, 4]},
        {"image_size": 32},
        {"layer_norm_eps": 1e-3},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "relu"},
        {"hidden_act": "silu"},
    ],
    ids=str,
)
def test_a_classifier_from_memory_and_from_its_folder(options: dict[str, Any], tmp_path: Path) -> None:
    module = classifier(**options)
    module.save_pretrained(tmp_path)
    for source in (module, tmp_path, str(tmp_path)):
        ours = load(source, task="vit").model
        assert ours.config.num_classes == options.get("num_labels", 5)
        x = images(ours)
        with torch.no_grad():
            assert_equal(ours(x), module(x).logits)


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    module = classifier()
    module.save_pretrained(tmp_path / "in")
    checkpoint = read(tmp_path / "in")
    to_hf(checkpoint, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back, info = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    x = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        assert torch.equal(back.eval()(x).logits, module(x).logits)
    again = read(tmp_path / "out")
    assert again.record() == checkpoint.record()
    assert all(torch.equal(again.state_dict[key], tensor) for key, tensor in checkpoint.state_dict.items())


def test_layers_and_attention(tmp_path: Path) -> None:
    module = classifier()
    module.set_attn_implementation("eager")
    ours = load(module).model
    x = images(ours)
    with torch.no_grad():
        theirs = module(x, output_hidden_states=True, output_attentions=True)
        features = ours.features(x, layers=[0, 1], attention=[0, 1])
    for mine, other in zip(features.attention, theirs.attentions, strict=True):
        assert_equal(mine, other)
    assert_equal(ours.embed(x), theirs.hidden_states[0])
    assert_equal(features.layers[0], theirs.hidden_states[1])


def test_a_bare_model_gives_features_and_its_pooler_is_left_out(tmp_path: Path) -> None:
    module = build(transformers.ViTModel)
    with pytest.warns(UserWarning, match=r"left out pooler.dense.bias, pooler.dense.weight"):
        loaded = load(module)
    x = images(loaded.model)
    with torch.no_grad():
        assert_equal(loaded.model(x), module(x).last_hidden_state[:, 0])
        to_hf(read_quietly(module), tmp_path)
        back = transformers.ViTModel.from_pretrained(tmp_path).eval()
        assert_equal(back(x).last_hidden_state, module(x).last_hidden_state)
    assert loaded.labels is None
    assert loaded.config["num_classes"] == 0


def read_quietly(module: Any) -> Checkpoint:
    with pytest.warns(UserWarning, match="left out"):
        return read(module)


def test_labels_travel(tmp_path: Path) -> None:
    names = [f"kind {i}" for i in range(12)]
    module = classifier(num_labels=12, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    checkpoint = read(module)
    assert checkpoint.labels == names  # 10 after 9, not after 1
    to_hf(checkpoint, tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).id2label == dict(enumerate(names))
    assert read(classifier()).labels is None  # LABEL_0 … are no names


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (
            {"size": {"height": 32, "width": 48}, "resample": 3, "image_mean": [0.1, 0.2, 0.3]},
            {"mean": [0.1, 0.2, 0.3], "std": [0.5] * 3, "interpolation": "bicubic"},
        ),
        ({"do_normalize": False}, {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"}),
    ],
    ids=["resample", "no normalisation"],
)
def test_preprocessing_travels(processor: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path)
    assert read(tmp_path).preprocess is None
    transformers.ViTImageProcessor(**processor).save_pretrained(tmp_path)
    wanted = {"size": [32, 48], "crop_pct": 1.0, "crop_mode": "squash", **expected}
    assert read(tmp_path).preprocess == wanted
    to_hf(read(tmp_path), tmp_path / "out")
    assert read(tmp_path / "out").preprocess == wanted
    back = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert dict(back.size) == {"height": 32, "width": 48}


def test_a_crop_travels(tmp_path: Path) -> None:
    preprocess = {
        "size": [32, 32],
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    module = classifier(image_size=32)
    to_hf(Checkpoint.of("vit", load(module).model, preprocess=preprocess), tmp_path)
    back = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert dict(back.size) == {"shortest_edge": 35}
    assert dict(back.crop_size) == {"height": 32, "width": 32}
    assert read(tmp_path).preprocess == {**preprocess, "crop_pct": 32 / 35}


def test_a_folder_in_shards_and_an_old_one(tmp_path: Path) -> None:
    module = classifier()
    x = torch.randn(2, 3, 32, 48)
    module.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    module.save_pretrained(tmp_path / "old")
    torch.save(load_file(tmp_path / "old/model.safetensors"), tmp_path / "old/pytorch_model.bin")
    (tmp_path / "old/model.safetensors").unlink()
    for folder in ("shards", "old"):
        with torch.no_grad():
            assert_equal(load(tmp_path / folder).model(x), module(x).logits)


def test_faults_are_told_in_one_line(tmp_path: Path) -> None:
    classifier().save_pretrained(tmp_path / "good")

    def spoiled(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    keys = spoiled("keys")
    state = load_file(keys / "model.safetensors")
    del state["vit.layernorm.bias"], state["classifier.weight"]
    state["vit.other"] = state["classifier.bias"]
    state["classifier.bias"] = torch.zeros(7)
    save_file(state, keys / "model.safetensors", {"format": "pt"})
    empty = spoiled("empty")
    (empty / "model.safetensors").unlink()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/config.json").write_text("not json")
    cases = {
        keys: "missing classifier.weight, vit.layernorm.bias; unknown vit.other; mis-shaped classifier.bias [7] "
        "(expected [5])",
        empty: "no weights, expected model.safetensors or pytorch_model.bin",
        tmp_path / "text": "not JSON",
        spoiled("type", model_type="bert"): "config.json has model_type 'bert', expected any with 'architecture', vit",
        spoiled("task", architectures=["ViTForMaskedImageModeling"]): "architecture 'ViTForMaskedImageModeling'",
        spoiled("none", architectures=None): "architecture None, expected ViTForImageClassification or ViTModel",
        spoiled("act", hidden_act="gelu_fast"): "hidden_act 'gelu_fast', expected one of gelu, ",
        spoiled("width", hidden_size="wide"): "its JSON files do not describe a ViT (TypeError(",
        spoiled("float", num_hidden_layers=2.5): "depth is 2.5, expected int",
        spoiled("heads", num_attention_heads=5): "embed_dim 48 is not a multiple of num_heads 5",
    }
    for folder, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            read(folder)
        assert message in str(caught.value), str(caught.value)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_hf_cannot_express_is_refused(tmp_path: Path) -> None:
    from multimodal.models.vit import ViTConfig

    model = ViT(ViTConfig(embed_dim=48, depth=1, num_heads=3, num_registers=2, pool="mean", attention="local",
                          attention_options={"window": 4}, conv_stem=True))  # fmt: skip
    expected = r"cannot express pool 'mean', num_registers 2, conv_stem True, attention 'local'"
    with pytest.raises(ValueError, match=expected):
        to_hf(Checkpoint.of("vit", model), tmp_path)
    assert list(tmp_path.iterdir()) == []
