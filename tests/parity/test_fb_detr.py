"""facebookresearch/detr's files, in and out, against HF's model; what the original computes is in `test_detr.py`."""

import re
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from multimodal import pretrained
from multimodal.blocks.backbone import TimmBackbone
from multimodal.data.detection import DetectionPreprocess
from multimodal.models.detr import DETR
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.fb_detr import read_file, rules, to_facebook
from multimodal.pretrained.keymap import KeyMap
from multimodal.pretrained.record import template
from tests.parity.detr import build, padded_batch, randomize, tiny
from tests.parity.keys import assert_close

RENAMED = (
    (r"^model\.backbone\.conv_encoder\.model", "backbone.0.body"),
    (r"^model\.input_projection", "input_proj"),
    (r"^model\.query_position_embeddings", "query_embed"),
    (r"^model\.decoder\.layernorm", "transformer.decoder.norm"),
    (r"^model\.", "transformer."),
    ("class_labels_classifier", "class_embed"),
    ("bbox_predictor", "bbox_embed"),
    ("self_attn_layer_norm", "norm1"),
    ("encoder_attn_layer_norm", "norm2"),
    (r"(decoder.*)final_layer_norm", r"\1norm3"),
    ("final_layer_norm", "norm2"),
    ("encoder_attn", "multihead_attn"),
    (r"\.fc(\d)", r".linear\1"),
    (r"\.q_proj\.", ".in_proj_"),
)
"""HF's published names and those of the original code, independently of the suite's tables."""


def facebook_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in state.items():
        if ".k_proj." in key or ".v_proj." in key:
            continue
        if ".q_proj." in key:
            value = torch.cat([state[key.replace("q_proj", f"{x}_proj")] for x in "qkv"])
        for pattern, new in RENAMED:
            key = re.sub(pattern, new, key)
        renamed[key] = value
    return renamed


def published(folder: Path, name: str = "detr-r50-1234.pth", **options: Any) -> tuple[Path, Any]:
    """A file as the original code writes it, and HF's module with the same weights."""
    module = build("resnet18", **options)
    module.save_pretrained(folder / "hf")
    state = facebook_names(load_file(folder / "hf/model.safetensors"))
    torch.save({"model": state}, folder / name)
    return folder / name, module


def said(path: Path) -> list[str]:
    """What is warned about when a file is read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read(path)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("dilation", [False, True])
def test_the_same_weights_as_hugging_faces(dilation: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    name = "detr-r50-dc5-1234.pth" if dilation else "detr-r50-1234.pth"
    path, module = published(tmp_path, name, dilation=dilation)
    loaded = load(path, task="detr")
    config = loaded.model.config
    assert (config.backbone, config.dilation) == ("resnet18", dilation)
    assert (config.num_classes, config.num_queries) == (5, 7)
    assert (config.encoder.depth, config.decoder.depth, config.encoder.num_heads) == (2, 3, 8)
    images, valid = padded_batch()
    with torch.no_grad():
        found, expected = loaded.model(images, valid), module(images, pixel_mask=valid.long())
    assert_close(found.logits, expected.logits)
    assert_close(found.boxes, expected.pred_boxes)
    other = read(module).state_dict
    assert all(torch.equal(other[key], value) for key, value in read(path).state_dict.items())


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path, _ = published(tmp_path)
    to_facebook(read(path), tmp_path / "out.pth")
    before, after = (torch.load(each, weights_only=True)["model"] for each in (path, tmp_path / "out.pth"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    torch.save(before, tmp_path / "detr-r50-bare.pth")
    assert read(tmp_path / "detr-r50-bare.pth").record() == read(path).record()


@pytest.mark.parametrize(
    ("name", "dilation"), [("resnet18", False), ("resnet50", False), ("resnet50", True)], ids=["18", "50", "50-dc5"]
)
def test_the_backbone_is_torchvisions(name: str, dilation: bool) -> None:
    """The original code has its ResNets from there: the same names, and the same stage that is dilated."""
    dilated = [False, False, dilation]
    theirs = resnet.__dict__[name](norm_layer=FrozenBatchNorm2d, replace_stride_with_dilation=dilated).eval()
    randomize(theirs)
    ours = TimmBackbone(name, dilation=dilation).eval()
    state = {key: value for key, value in theirs.state_dict().items() if not key.startswith("fc.")}
    ours.net.load_state_dict(state)
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = IntermediateLayerGetter(theirs, {"layer4": "0"})(images)["0"]
        assert_close(ours(images), expected)
    assert expected.shape[-2:] == ((4, 6) if dilation else (2, 3))
    config = tiny_config(backbone=name)
    names = KeyMap(rules(config), template("detr", config)).theirs
    assert {key for key in names if key.startswith("backbone.")} == {f"backbone.0.body.{key}" for key in state}


def tiny_config(**changes: Any) -> Any:
    with torch.device("meta"):
        return tiny(**changes).config


@pytest.mark.parametrize(("backbone", "blocks"), [("resnet34", 6), ("resnet50", 6), ("resnet101", 23)], ids=str)
def test_the_backbone_is_told_by_its_third_stage(backbone: str, blocks: int, tmp_path: Path) -> None:
    config = tiny_config(backbone=backbone)
    names = KeyMap(rules(config), template("detr", config)).theirs
    assert f"backbone.0.body.layer3.{blocks - 1}.conv1.weight" in names
    state = {key: torch.zeros(()).expand(value.shape) for key, value in names.items()}
    assert read_file(tmp_path / "detr-r50.pth", state).config["backbone"] == backbone


def write(path: Path, **changes: Any) -> dict[str, Tensor]:
    """A file of ours at `path`; its weights."""
    to_facebook(Checkpoint.of("detr", tiny(**({"backbone": "resnet18"} | changes))), path)
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["model"]
    return state


def test_cocos_classes_are_known_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "detr-r50.pth"
    write(path, num_classes=91)
    checkpoint = read(path)
    names = checkpoint.labels
    assert names is not None
    assert len(names) == 91
    assert [names[i] for i in (0, 1, 12, 17, 44, 62, 90)] == [
        "N/A",
        "person",
        "N/A",
        "cat",
        "bottle",
        "chair",
        "toothbrush",
    ]
    assert len(set(names)) == 81
    assert checkpoint.preprocess == {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
        "shortest_edge": 800,
        "longest_edge": 1333,
        "category_ids": list(range(91)),
    }
    transform = DetectionPreprocess.from_dict(checkpoint.preprocess)
    assert transform == DetectionPreprocess(category_ids=tuple(range(91)))
    write(path, num_classes=20)
    assert read(path).labels is None
    assert read(path).preprocess == checkpoint.preprocess | {"category_ids": None}


def test_dilation_is_told_by_the_name(tmp_path: Path) -> None:
    write(tmp_path / "mine-DC5.pth", dilation=True)
    assert read(tmp_path / "mine-DC5.pth").config["dilation"]
    assert said(tmp_path / "mine-DC5.pth") == []
    write(tmp_path / "mine.pth")
    (message,) = said(tmp_path / "mine.pth")
    assert message == (
        f"{tmp_path}/mine.pth: the file does not say whether its backbone is dilated and how many heads it has; "
        "it is taken as not dilated, since its name has no 'dc5' in it, and as of 8 heads"
    )
    for name in ("detr-r50-e632da11.pth", "detr-r101-2c7b67e5.pth"):
        (tmp_path / name).write_bytes((tmp_path / "mine.pth").read_bytes())
        assert said(tmp_path / name) == []


def test_faults_are_told_in_one_line(tmp_path: Path) -> None:
    state = write(tmp_path / "good.pth")
    first = "transformer.decoder.layers.0"

    def spoiled(name: str, *without: str, **more: Tensor) -> Path:
        path = tmp_path / f"detr-r50-{name}.pth"
        kept = {key: value for key, value in state.items() if key not in without}
        torch.save({"model": kept | {key.replace("__", "."): value for key, value in more.items()}}, path)
        return path

    masks = tmp_path / "detr-r50-panoptic.pth"
    torch.save({"model": {f"detr.{key}": value for key, value in state.items()}}, masks)
    third = [key for key in state if key.startswith("backbone.0.body.layer3.1.")]
    cases = {
        masks: "holds a panoptic DETR, which draws masks; expected one that only detects",
        spoiled("masks", mask_head__lay1__weight=torch.zeros(1)): "holds a panoptic DETR",
        spoiled("pre", transformer__encoder__norm__weight=torch.zeros(32)): "holds a DETR with norms before each part",
        spoiled("conditional", f"{first}.multihead_attn.in_proj_weight"): (
            f"holds a model without {first}.multihead_attn.in_proj_weight, expected a DETR of facebookresearch/detr"
        ),
        spoiled("flat", query_embed__weight=torch.zeros(3)): "a model with query_embed.weight of shape [3], expected",
        spoiled("depth", *third): "backbone.0.body.layer3 has 1 basic blocks, expected one of resnet18, resnet34,",
        spoiled("keys", "input_proj.bias", other=torch.zeros(1)): "missing input_proj.bias; unknown other",
        spoiled("narrow", query_embed__weight=torch.zeros(3, 12)): "embed_dim 12 is not a multiple of num_heads 8",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            read(path)
        assert message in str(caught.value), str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": "sigmoid"}, "that format cannot express scores 'sigmoid'"),
        ({"queries": "boxes", "denoising": 2}, "that format cannot express queries 'boxes'"),
        ({"backbone": "conv"}, "that format cannot express backbone 'conv'"),
        ({"backbone": "test_resnet"}, "that format cannot express backbone 'test_resnet'"),
        ({"decoder": {"num_heads": 4}}, "that format cannot express decoder.num_heads 4"),
        ({"decoder": {"norm_order": "pre"}}, "that format cannot express decoder.norm_order 'pre'"),
        ({"decoder": {"mlp_ratio": 3.0}}, "that format cannot express decoder.mlp_ratio 3.0"),
        ({"encoder": {"activation": "gelu"}}, "that format cannot express encoder.activation 'gelu'"),
        ({"dilation": True}, "dilation is True, which the name of the file has to tell: expected one with 'dc5' in it"),
    ],
    ids=str,
)
def test_what_the_original_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model: DETR = tiny(**({"backbone": "resnet18"} | changes))
    with pytest.raises(ValueError, match=r"^export to facebookresearch/detr: ") as caught:
        to_facebook(Checkpoint.of("detr", model), tmp_path / "out.pth")
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_would_mislead_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dilation is False, .* expected one without 'dc5' in it, not a-dc5\.pth"):
        write(tmp_path / "a-dc5.pth")
    write(tmp_path / "tagged.pth", backbone="resnet18.a1_in1k")


def test_a_checkpoint_of_the_original_training_is_read(tmp_path: Path) -> None:
    path, _ = published(tmp_path)
    state = torch.load(path, weights_only=True)["model"]
    torch.save({"model": state, "epoch": 3, "args": Namespace(lr=1e-4)}, tmp_path / "detr-r50-training.pth")
    expected = pretrained.read(path, task="detr").state_dict
    found = pretrained.read(tmp_path / "detr-r50-training.pth", task="detr").state_dict
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
