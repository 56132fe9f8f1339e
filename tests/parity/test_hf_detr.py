"""Whole DETRs against Hugging Face's, weights in and out."""

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from multimodal.data.detection import DetectionPreprocess
from multimodal.models.detr import DETR, DETROutput
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.hf_detr import to_hf
from tasks.detr.criterion import SetCriterion
from tasks.detr.matcher import HungarianMatcher, Targets
from tests.parity.detr import build, padded_batch, save, tiny, tokens_of
from tests.parity.keys import assert_close

transformers = pytest.importorskip("transformers")
STAGES = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
OLD_PROCESSOR = {"size": 640, "max_size": 900, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3}


def own_resnet(**options: Any) -> Any:
    """The config of a ResNet of HF's own."""
    return transformers.ResNetConfig(**(STAGES | {"out_features": ["stage4"]} | options))


@torch.no_grad()
def assert_same(ours: DETR, theirs: Any) -> None:
    """Equal outputs for a padded batch, and for one without a mask."""
    images, valid = padded_batch()
    images = images.to(theirs.dtype)
    for mask in (valid, None):
        expected = theirs(images, pixel_mask=None if mask is None else mask.long())
        found = ours(images, mask)
        assert_close(found.logits, expected.logits)
        assert_close(found.boxes, expected.pred_boxes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backbone": "test_convnext", "backbone_config": {"model_type": "timm_backbone", "out_indices": [3]}},
        {"dilation": True},
        {"encoder_ffn_dim": 40, "decoder_attention_heads": 4, "activation_function": "gelu"},
        {"use_timm_backbone": False, "backbone_config": "own"},
    ],
    ids=["resnet", "convnext", "dilated", "sides", "own resnet"],
)
def test_from_memory_and_from_its_folder(options: dict[str, Any], tmp_path: Path) -> None:
    if options.get("backbone_config") == "own":
        options = options | {"backbone_config": own_resnet()}
    elif "backbone_config" in options:
        options = options | {"backbone_config": options["backbone_config"] | {"backbone": options["backbone"]}}
    module = build(**options)
    for source in (module, save(module, tmp_path)):
        loaded = load(source, task="detr")
        assert loaded.config["num_classes"] == 5
        assert loaded.config["dilation"] == options.get("dilation", False)
        if "use_timm_backbone" in options:  # of full width and without a trained norm: it magnifies float32's rounding
            assert_same(loaded.model.double(), copy.deepcopy(module).double())
        else:
            assert_same(loaded.model, module)


@torch.no_grad()
def test_hidden_states() -> None:
    module = build()
    ours = load(module).model
    images, valid = padded_batch()
    encoder, decoder = tokens_of(ours.encoder.blocks), tokens_of(ours.decoder.blocks)
    memory, *rest = ours.encode(images, valid)
    ours.decode(memory, *rest)
    theirs = module(images, pixel_mask=valid.long(), output_hidden_states=True)
    assert_close(memory, theirs.encoder_last_hidden_state)
    assert (len(encoder), len(decoder)) == (2, 3)
    for mine, other in zip(encoder, theirs.encoder_hidden_states[1:], strict=True):
        assert_close(mine, other)
    for mine, other in zip(decoder[:-1], theirs.decoder_hidden_states[1:-1], strict=True):
        assert_close(mine, other)
    assert_close(ours.decoder.norm(decoder[-1]), theirs.last_hidden_state)


@torch.no_grad()
def test_loss() -> None:
    module = build()
    images, valid = padded_batch()
    labels = torch.tensor([[0, 4, 1], [2, 2, -1], [-1, -1, -1]])
    boxes = torch.rand(3, 3, 4) * 0.4 + 0.3
    given = [
        {"class_labels": each[each >= 0], "boxes": box[each >= 0]} for each, box in zip(labels, boxes, strict=True)
    ]
    theirs = module(images, pixel_mask=valid.long(), labels=given)
    output = DETROutput(*(part[None] for part in load(module).model(images, valid)))
    targets = Targets(labels, boxes, labels > 9)
    criterion = SetCriterion()
    losses = criterion(output, targets, HungarianMatcher()(output, targets))
    for name, value in losses.items():
        assert_close(value[0], theirs.loss_dict[name])
    assert_close(criterion.total(losses), theirs.loss)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dilation": True, "dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.3},
        {"encoder_ffn_dim": 40, "decoder_attention_heads": 4, "activation_function": "gelu"},
        {"backbone_config": {"model_type": "timm_backbone", "backbone": "test_convnext", "out_indices": [3]}},
    ],
    ids=["plain", "dilated", "sides", "convnext"],
)
def test_a_folder_comes_back_as_it_was(options: dict[str, Any], tmp_path: Path) -> None:
    module = build(**options)
    checkpoint = read(save(module, tmp_path / "in"))
    to_hf(checkpoint, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back, info = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    back.set_attn_implementation("eager")
    images, valid = padded_batch()
    with torch.no_grad():
        found, expected = (each(images, pixel_mask=valid.long()) for each in (back.eval(), module))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.pred_boxes, expected.pred_boxes)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        assert getattr(back.config, name) == getattr(module.config, name)
    again = read(tmp_path / "out")
    assert again.record() == checkpoint.record()
    assert all(torch.equal(again.state_dict[key], tensor) for key, tensor in checkpoint.state_dict.items())


def test_hfs_own_resnet_is_written_as_timms(tmp_path: Path) -> None:
    module = build(backbone_config=own_resnet(), use_timm_backbone=False)
    checkpoint = read(module)
    assert checkpoint.config["backbone"] == "resnet18"
    to_hf(checkpoint, tmp_path)
    back = transformers.DetrForObjectDetection.from_pretrained(tmp_path).eval()
    images, valid = padded_batch()
    with torch.no_grad():
        assert_close(back(images, valid.long()).logits, module(images, valid.long()).logits)


def test_the_folder_on_the_hub(tmp_path: Path) -> None:
    """Its config.json has the fields of 2021, and older weights count the batches of their batch norms."""
    module = build()
    save(module, tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    del hf["backbone_config"]
    old = {"backbone": "test_resnet", "use_timm_backbone": True, "backbone_config": None, "max_position_embeddings": 9}
    (tmp_path / "config.json").write_text(json.dumps(hf | old))
    state = load_file(tmp_path / "model.safetensors")
    state["model.backbone.conv_encoder.model.bn1.num_batches_tracked"] = torch.tensor(0)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same(load(tmp_path).model, module)


def test_labels_and_preprocessing_travel(tmp_path: Path) -> None:
    names = ["N/A", *(f"kind {i}" for i in range(10)), "N/A"]
    module = build(num_labels=12, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)})
    save(module, tmp_path)
    assert read(tmp_path).labels == names  # 10 after 9, not after 1
    assert read(tmp_path).preprocess is None
    assert read(build()).labels is None  # LABEL_0 … are no names
    transformers.DetrImageProcessor().save_pretrained(tmp_path)
    published = {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
        "shortest_edge": 800,
        "longest_edge": 1333,
        "category_ids": None,
    }
    assert read(tmp_path).preprocess == published
    assert DetectionPreprocess.from_dict(published) == DetectionPreprocess()
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "D", **OLD_PROCESSOR}))
    changes = {"shortest_edge": 640, "longest_edge": 900, "mean": [0.1, 0.2, 0.3], "std": [0.5] * 3}
    assert read(tmp_path).preprocess == published | changes
    ids = [7, 3, *range(20, 30)]
    wanted = published | changes | {"category_ids": ids}
    to_hf(Checkpoint.of("detr", load(tmp_path).model, preprocess=wanted, labels=names), tmp_path / "out")
    assert (read(tmp_path / "out").labels, read(tmp_path / "out").preprocess) == (names, wanted)
    back = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert type(back).__name__.startswith("DetrImageProcessor")
    assert dict(back.size) == {"shortest_edge": 640, "longest_edge": 900}
    assert list(back.image_mean) == [0.1, 0.2, 0.3]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").id2label == dict(enumerate(names))


def test_a_norm_that_is_fed_back_is_said() -> None:
    with pytest.warns(UserWarning, match="auxiliary_loss is true, by which transformers norms the tokens after each"):
        read(build(auxiliary_loss=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(build())


def test_faults_are_told_in_one_line(tmp_path: Path) -> None:
    save(build(), tmp_path / "good")
    processor = {"do_resize": True, "size": {"height": 5, "width": 5}}

    def spoiled(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "good", folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def resized(name: str, **changes: Any) -> Path:
        folder = spoiled(name)
        (folder / "preprocessor_config.json").write_text(json.dumps(processor | changes))
        return folder

    def inner(name: str, **config: Any) -> Path:
        return spoiled(name, backbone_config=config)

    keys = spoiled("keys")
    state = load_file(keys / "model.safetensors")
    state["model.other"] = state.pop("model.input_projection.bias")
    save_file(state, keys / "model.safetensors", {"format": "pt"})
    deep = {"model_type": "resnet", "depths": [1, 1, 1, 1]}
    cases = {
        keys: "missing model.input_projection.bias; unknown model.other",
        spoiled("queries", num_queries=9): "mis-shaped model.query_position_embeddings.weight [7, 32] (expected [9, 32",
        spoiled("other", model_type="conditional_detr"): "model_type 'conditional_detr', expected any with 'architec",
        spoiled(
            "dab", model_type="dab-detr"
        ): "model_type 'dab-detr', expected any with 'architecture', vit, clip, detr",
        spoiled("masks", architectures=["DetrForSegmentation"]): "'DetrForSegmentation', expected 'DetrForObjectDetec",
        spoiled("learned", position_embedding_type="learned"): "position_embedding_type 'learned', expected 'sine'",
        spoiled("grey", num_channels=1): "num_channels 1, expected 3",
        spoiled("act", activation_function="mish"): "activation_function 'mish', expected one of gelu, ",
        spoiled("width", d_model="wide"): "its JSON files do not describe a DETR (TypeError(",
        spoiled("hub", backbone_config=None, use_timm_backbone=False, backbone="a/b"): "backbone 'a/b' of the hub",
        inner("swin", model_type="swin"): "backbone_config has model_type 'swin', expected 'timm_backbone' or 'resnet'",
        inner("depths", **deep): "depths [1, 1, 1, 1] of 'bottleneck'",
        inner("short", model_type="resnet", depths=[1]): "do not describe a DETR (IndexError(",
        inner("stride", model_type="timm_backbone", output_stride=8): "output_stride 8, expected 16 or 32",
        inner("lite", model_type="timm_backbone", backbone="efficientnet_lite0"): "norms with an activation or another",
        inner("none", model_type="timm_backbone", backbone="resnet5"): "backbone 'resnet5' is not to be had from timm",
        resized("size"): "size {'height': 5, 'width': 5}, expected images resized to a shortest_edge and a",
        resized("kept", do_resize=False): "do_resize False, expected images resized to",
        resized("raw", size=800, do_rescale=False): "pixels are not scaled by 1/255",
    }
    for folder, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            read(folder)
        assert message in str(caught.value), str(caught.value)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": "sigmoid"}, "scores 'sigmoid'"),
        ({"queries": "boxes", "modulated": True}, "queries 'boxes', modulated True"),
        ({"backbone": "conv"}, "backbone 'conv'"),
        ({"encoder": {"norm_order": "pre"}}, "encoder.norm_order 'pre'"),
        ({"encoder": {"final_norm": True}}, "encoder.final_norm True"),
        ({"decoder": {"gated": True, "norm_eps": 1e-6}}, "decoder.gated True, decoder.norm_eps 1e-06"),
        ({"decoder": {"activation": "gelu"}}, "decoder.activation 'gelu'"),
        ({"decoder": {"num_kv_heads": 1}}, "decoder.num_kv_heads 1"),
        (
            {"encoder": {"attention": "local", "attention_options": {"window": 4}}},
            "encoder.attention 'local'",
        ),
    ],
    ids=str,
)
def test_what_hf_cannot_express_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export to HF DETR: that format cannot express ") as caught:
        to_hf(Checkpoint.of("detr", tiny(**changes)), tmp_path)
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_backbone_that_transformers_spoils_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backbone 'test_efficientnet' has batch norms with an activation"):
        to_hf(Checkpoint.of("detr", tiny(backbone="test_efficientnet")), tmp_path)
