"""Where weights may come from: published names, folders, bare files, and what is said where there is nothing."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_for_hf
from torch import nn

from multimodal.models.vit import ViT
from multimodal.pretrained import SOURCES, Checkpoint, load, read, save
from multimodal.pretrained.timm_vit import to_timm

TAGGED = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
PREPROCESS = {
    "size": [224, 224],
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
}


@pytest.fixture(scope="module")
def module() -> Any:
    """ViT-Ti with the config of published weights and weights of its own."""
    torch.manual_seed(1)
    return timm.create_model(TAGGED, depth=12).eval()


def small(**options: Any) -> Any:
    return timm.create_model("test_vit", **options).eval()


def assert_same(source: Any, module: Any) -> None:
    loaded = load(source, task="vit")
    x = torch.randn(1, loaded.config["in_channels"], *loaded.model.config.image_hw)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(x), module(x), atol=1e-5, rtol=1e-5)


def fails(source: Any) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- timm:NAME


def test_a_published_name_is_fetched_by_timm(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = timm.create_model, []

    def fake(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        calls.append((name, pretrained))
        return module if pretrained else create(name, **options)

    monkeypatch.setattr(timm, "create_model", fake)
    checkpoint = read(f"timm:{TAGGED}")
    assert calls == [(TAGGED, False), (TAGGED, True)]
    assert checkpoint.preprocess == PREPROCESS
    assert checkpoint.labels is not None
    assert len(set(checkpoint.labels)) == 1000
    assert checkpoint.labels[0] == "tench, Tinca tinca"
    assert [label for label in checkpoint.labels if label.startswith("crane")] == [
        "crane (n02012849)",
        "crane (n03126707)",
    ]
    exported = to_timm(checkpoint)
    assert all(torch.equal(exported[key], tensor) for key, tensor in module.state_dict().items())
    assert_same(f"timm:{TAGGED}", module)


def test_without_a_network_one_line_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            raise OSError("cannot reach the hub\nand nothing is cached")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    assert fails(f"timm:{TAGGED}") == (
        f"timm:{TAGGED}: timm.create_model('{TAGGED}', pretrained=True) failed (OSError: cannot reach the hub and "
        "nothing is cached); expected a network or timm's cache, or else give a file or folder with the weights"
    )


def test_what_is_not_covered_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def never(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        assert not pretrained
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", never)
    assert "not covered, because its class is ResNet" in fails("timm:resnet18")
    assert "not covered, because it pools by 'map'" in fails("timm:vit_base_patch16_siglip_224.webli")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:vit_tiny_patch16_225", "timm has no such weights, did you mean timm:vit_tiny_patch16_224?"),
        (f"timm:{TAGGED}2", f"timm has no such weights, did you mean timm:{TAGGED}?"),
        ("timm:", "timm has no such weights"),
        ("tim:vit_tiny_patch16_224", "no such file or folder, expected a run folder, "),
        ("vit_tiny_patch16_224", "no such file or folder, expected a run folder, "),
        ("", "no source is named, expected a run folder, "),
    ],
)
def test_a_name_that_does_not_exist(name: str, message: str) -> None:
    assert message in fails(name)


# ------------------------------------------------------------------------------------------------------ timm's folders


def test_a_folder_of_timms_hub(module: Any, tmp_path: Path) -> None:
    save_for_hf(module, tmp_path, safe_serialization=True)
    checkpoint = read(tmp_path)
    assert checkpoint.preprocess == PREPROCESS
    assert checkpoint.labels is not None
    assert checkpoint.labels[1] == "goldfish, Carassius auratus"
    assert_same(tmp_path, module)


def test_a_fine_tuned_folder_brings_its_own_size_and_labels(tmp_path: Path) -> None:
    module = small(num_classes=3, img_size=(64, 96), in_chans=1)
    names = ["cat", "dog", "eel"]
    args = {"img_size": (64, 96), "in_chans": 1}
    data = {"mean": (0.4,), "std": (0.2,), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"}
    save_for_hf(module, tmp_path, model_config={"model_args": args, "label_names": names, "pretrained_cfg": data})
    checkpoint = read(tmp_path)
    assert checkpoint.labels == names
    assert checkpoint.preprocess == {**data, "size": [64, 96], "mean": [0.4], "std": [0.2]}
    assert checkpoint.config["num_classes"] == 3
    assert_same(tmp_path, module)


def test_folders_that_hold_nothing_known(tmp_path: Path) -> None:
    assert "neither checkpoints/ nor config.json in it, expected a run folder" in fails(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    assert "config.json: holds a list, expected a JSON object" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_nope", "pretrained_cfg": {}}))
    assert "timm cannot build it (RuntimeError: Unknown model (vit_nope))" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": {}}))
    assert "no weights, expected model.safetensors or pytorch_model.bin" in fails(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "config.json has model_type 'llama', expected any with 'architecture', vit" in fails(tmp_path)


# --------------------------------------------------------------------------------------------------------- bare files


@pytest.mark.parametrize("ending", [".safetensors", ".pth", ".bin", ".pt"])
def test_a_bare_file_is_known_by_its_name(ending: str, module: Any, tmp_path: Path) -> None:
    path = tmp_path / f"{TAGGED}{ending}"
    if ending == ".safetensors":
        save_file(module.state_dict(), path)
    else:
        torch.save({"model": module.state_dict(), "epoch": 3} if ending == ".pth" else module.state_dict(), path)
    checkpoint = read(path)
    assert checkpoint.preprocess == PREPROCESS
    assert checkpoint.labels is not None
    assert_same(path, module)


def test_head_and_channels_are_those_of_the_file(tmp_path: Path) -> None:
    module = small(num_classes=7, in_chans=1)
    save_file(module.state_dict(), tmp_path / "test_vit.r160_in1k.safetensors")
    checkpoint = read(tmp_path / "test_vit.r160_in1k.safetensors")
    assert checkpoint.labels is None
    assert checkpoint.preprocess is None  # mean and std of three channels do not fit
    assert_same(tmp_path / "test_vit.r160_in1k.safetensors", module)
    headless = small(num_classes=0)
    save_file(headless.state_dict(), tmp_path / "test_vit.r160_in1k.safetensors")
    assert_same(tmp_path / "test_vit.r160_in1k.safetensors", headless)


@pytest.mark.parametrize("name", ["test_vit", "test_vit.mine"])
def test_without_a_known_tag_preprocessing_is_unknown_and_that_is_said(name: str, tmp_path: Path) -> None:
    module = small()
    path = tmp_path / f"{name}.safetensors"
    save_file(module.state_dict(), path)
    with pytest.warns(UserWarning, match=r"the name has no tag of timm's, so preprocessing and labels are not known"):
        checkpoint = read(path)
    assert checkpoint.preprocess is None
    assert checkpoint.labels is None


def test_bare_files_that_do_not_fit(tmp_path: Path) -> None:
    state = small().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    assert "the file does not say which architecture it holds; name it as timm does" in fails(
        tmp_path / "model.safetensors"
    )
    state["norm.extra"] = state.pop("norm.bias")
    state["pos_embed"] = torch.zeros(1, 5, 64)
    save_file(state, tmp_path / "test_vit.r160_in1k.safetensors")
    assert fails(tmp_path / "test_vit.r160_in1k.safetensors").endswith(
        "the weights do not fit the model: missing norm.bias; unknown norm.extra; "
        "mis-shaped pos_embed [1, 5, 64] (expected [1, 101, 64])"
    )
    torch.save({"model": 3}, tmp_path / "x.pth")
    assert "holds no table of named tensors" in fails(tmp_path / "x.pth")
    (tmp_path / "y.pth").write_bytes((tmp_path / "x.pth").read_bytes()[:100])
    assert "cut short" in fails(tmp_path / "y.pth")


# ---------------------------------------------------------------------------------------------------------- in memory


def test_a_module_is_copied(tmp_path: Path) -> None:
    module = small()
    checkpoint = read(module)
    before = {key: tensor.clone() for key, tensor in checkpoint.state_dict.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(torch.equal(checkpoint.state_dict[key], tensor) for key, tensor in before.items())
    save(tmp_path / "x.safetensors", checkpoint)


def test_half_precision_is_kept_and_loads_as_float32() -> None:
    module = small().half()
    checkpoint = read(module)
    exported = to_timm(checkpoint)
    assert all(torch.equal(exported[key], tensor) for key, tensor in module.state_dict().items())
    assert {tensor.dtype for tensor in exported.values()} == {torch.float16}
    assert load(module).model.head.weight.dtype == torch.float32


def test_labels_only_where_tag_and_number_of_classes_agree() -> None:
    for name, classes, first in (
        ("vit_base_patch16_224.augreg_in21k", 21843, "organism, being"),
        ("vit_base_patch16_224_miil.in21k", 11221, "benthos"),
        ("vit_medium_patch16_reg4_gap_256.sbb_in12k", 11821, "benthos"),
        ("vit_base_patch16_224.dino", 0, None),
        ("vit_base_patch16_clip_224.openai", 512, None),
    ):
        with torch.device("meta"):
            module = timm.create_model(name, depth=1, embed_dim=12, num_heads=1, img_size=32)
        module = module.to_empty(device="cpu")
        labels = read(module).labels
        assert module.num_classes == classes
        if first is None:
            assert labels is None
        else:
            assert labels is not None
            assert labels[0] == first
            assert len(set(labels)) == classes
    assert read(small(num_classes=5)).labels is None


def test_modules_of_no_known_source() -> None:
    assert fails(nn.Linear(2, 2)).startswith(
        "torch.nn.modules.linear.Linear: no known source, expected a module of timm"
    )


def test_another_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"VisionTransformer: holds a model of task 'vit', expected 'detr'"):
        read(small(), task="detr")


def test_a_change_that_needs_other_weights_lists_them() -> None:
    with pytest.raises(ValueError, match=r"mis-shaped head.bias \[1000\] \(expected \[4\]\), head.weight"):
        load(small(), changes={"num_classes": 4})
    with pytest.raises(ValueError, match=r"unknown field 'image', did you mean 'image_size'?"):
        load(small(), changes={"image": 4})


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_order": "post"}, "norm_order 'post'"),
        ({"rope": "half"}, "rope 'half'"),
        ({"num_heads": 4, "num_kv_heads": 2}, "num_kv_heads 2"),
        ({"key_bias": False}, "key_bias False"),
        ({"attention": "local", "attention_options": {"window": 3}}, "attention 'local'"),
        ({"pre_norm": True}, "patch_bias True"),
        ({"out_bias": False}, "mlp_bias True"),
    ],
)
def test_what_timm_cannot_express_is_refused(changes: dict[str, Any], message: str) -> None:
    from multimodal.models.vit import ViTConfig

    model = ViT(ViTConfig(**({"embed_dim": 16, "depth": 1, "num_heads": 2, "image_size": 32} | changes)))
    with pytest.raises(ValueError, match=r"export to timm: that format cannot express ") as caught:
        to_timm(Checkpoint.of("vit", model))
    assert message in str(caught.value)


def test_every_source_has_its_file() -> None:
    for source in SOURCES:
        if source.library:
            assert callable(source.reader("read_module"))
        if source.model_type or source.folder_key:
            assert callable(source.reader("read_folder"))
        if source.wrapped:
            assert callable(source.reader("read_wrapped"))
        if source.prefix:
            assert callable(source.reader("read_published"))
        if source.file_key:
            assert callable(source.reader("read_file"))


def test_nothing_is_warned_about_where_all_is_known(module: Any, tmp_path: Path) -> None:
    save_file(module.state_dict(), tmp_path / f"{TAGGED}.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(module)
        load(tmp_path / f"{TAGGED}.safetensors")
