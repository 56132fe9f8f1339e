"""What `multimodal export vit` writes, opened by the tools that it is written for."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn

from multimodal import pretrained
from multimodal.pretrained import Checkpoint
from tasks import export, formats, registry
from tests.tasks.commands import Run
from tests.tasks.test_export import LABELS, PREPROCESS, form_of, tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"pool": "mean", "class_token": False},
    "grey-rectangle": {"in_channels": 1, "image_size": (16, 32), "patch_size": (4, 8)},
    "headless": {"num_classes": 0},
    "distilled": {"distilled": True},
    "local": {"attention": "local", "attention_options": {"window": 3}},
    "rotary": {"position": "none", "rope": "half", "num_kv_heads": 1},
    "gated": {"gated": True, "activation": "silu", "norm": "rms", "qk_norm": True, "layer_scale": 0.1},
    "post-norm": {"norm_order": "post", "activation": "quick_gelu"},
}


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(images)


def _images(checkpoint: Checkpoint, batch_size: int) -> Tensor:
    return formats.example_of(checkpoint, batch_size).inputs["image"]


def _close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", ["mean", "grey-rectangle", "headless", "distilled", "local", "rotary", "gated"])
def test_onnx_runs_at_any_batch_size(tmp_path: Path, name: str) -> None:
    checkpoint = tiny(**VARIANTS[name])
    out = tmp_path / "model.onnx"
    assert export.export(checkpoint, form_of("onnx"), out) <= 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    answer = "logits" if checkpoint.config["num_classes"] else "features"
    assert [given.name for given in session.get_inputs()] == ["image"]
    assert [given.name for given in session.get_outputs()] == [answer]
    assert session.get_inputs()[0].shape[0] == "batch"
    images = _images(checkpoint, 7)
    (found,) = session.run([answer], {"image": images.numpy()})
    assert _close(torch.from_numpy(found), _logits(formats.build_model(checkpoint, "test"), images))
    operators = {node.domain for node in onnx.load(out).graph.node}
    assert operators <= {"", "ai.onnx"}, "an operator that other runtimes lack"


def test_onnx_carries_the_record_and_no_path_of_this_machine(tmp_path: Path) -> None:
    export.export(tiny(), form_of("onnx"), tmp_path / "model.onnx")
    described = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    record = json.loads(described["multimodal"])
    assert record == tiny().record()
    assert (record["labels"], record["preprocess"], record["task"]) == (LABELS, PREPROCESS["vit"], "vit")
    assert str(Path(registry.__file__).parents[1]).encode() not in (tmp_path / "model.onnx").read_bytes()


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_program_runs_at_any_batch_size(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = tiny(**changes)
    out = tmp_path / "model.pt2"
    assert export.export(checkpoint, form_of("torch-export"), out) <= 1e-5
    extra = {"multimodal": ""}
    program = torch.export.load(out, extra_files=extra)
    assert json.loads(extra["multimodal"]) == checkpoint.record()
    targets = {str(node.target) for node in program.graph.nodes}
    assert not [target for target in targets if "mkldnn" in target], "an operator of this kind of processor"
    images = _images(checkpoint, 7)
    with torch.no_grad():
        found = program.module()(images)
    assert _close(found, _logits(formats.build_model(checkpoint, "test"), images))
    assert str(Path(registry.__file__).parents[1]).encode() not in out.read_bytes()


@pytest.mark.parametrize("name", ["plain", "mean", "grey-rectangle", "headless", "distilled", "gated"])
def test_timm_loads_the_folder_by_itself(tmp_path: Path, name: str) -> None:
    preprocess = PREPROCESS["vit"] | ({"mean": [0.4], "std": [0.2]} if name == "grey-rectangle" else {})
    checkpoint = tiny(**VARIANTS[name])
    checkpoint = Checkpoint.from_record(
        checkpoint.record() | {"preprocess": preprocess | {"size": [16, 32] if name == "grey-rectangle" else [16, 16]}},
        checkpoint.state_dict,
        "test",
    )
    out = tmp_path / "out"
    assert export.export(checkpoint, form_of("timm"), out) == 0
    module = timm.create_model(f"local-dir:{out}", pretrained=True)
    images = _images(checkpoint, 3)
    assert _close(_logits(module, images), _logits(formats.build_model(checkpoint, "test"), images))
    wanted = checkpoint.preprocess
    assert wanted is not None
    described = timm.data.resolve_model_data_config(module)
    assert described.pop("input_size") == (checkpoint.config["in_channels"], *wanted["size"])
    assert described == {name: value for name, value in wanted.items() if name != "size"}
    if name != "headless":
        assert list(module.pretrained_cfg["label_names"]) == LABELS
        again = pretrained.read(out)
        assert (again.preprocess, again.labels) == (wanted, LABELS)


@pytest.mark.parametrize("name", ["plain", "grey-rectangle"])
def test_hugging_face_loads_the_folder_by_itself(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    preprocess = PREPROCESS["vit"] | {"crop_mode": "squash", "crop_pct": 1.0}
    checkpoint = tiny(**VARIANTS[name])
    checkpoint = Checkpoint.from_record(checkpoint.record() | {"preprocess": preprocess}, checkpoint.state_dict, "test")
    out = tmp_path / "out"
    assert export.export(checkpoint, form_of("huggingface"), out) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    module = transformers.ViTForImageClassification.from_pretrained(out)
    images = _images(checkpoint, 3)
    with torch.no_grad():
        found = module.eval()(images).logits
    assert _close(found, _logits(formats.build_model(checkpoint, "test"), images))
    assert [module.config.id2label[index] for index in range(5)] == LABELS
    assert module.config.label2id == {label: index for index, label in enumerate(LABELS)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("timm", {"position": "none", "rope": "half"}, "export to timm: that format cannot express rope 'half'"),
        ("timm", VARIANTS["local"], "export to timm: that format cannot express attention 'local'"),
        ("timm", {"norm_eps": 1e-12}, "export to timm: that format cannot express norm_eps 1e-12"),
        ("timm", {"head_dim": 8}, "export to timm: that format cannot express head_dim 8"),
        ("timm", {"num_kv_heads": 1}, "export to timm: that format cannot express num_kv_heads 1"),
        (
            "huggingface",
            VARIANTS["mean"],
            "export to HF ViT: that format cannot express pool 'mean', class_token False",
        ),
        ("huggingface", VARIANTS["distilled"], "export to HF ViT: that format cannot express distilled True"),
        ("huggingface", {"rope": "half"}, "export to HF ViT: that format cannot express rope 'half'"),
    ],
)
def test_what_a_format_cannot_express_is_named(
    run: Run, tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    pretrained.save(tmp_path / "model.safetensors", tiny(**changes))
    result = run("export", "vit", "--checkpoint", tmp_path / "model.safetensors", "--to", name, tmp_path / "out")
    assert result.error == message
    assert (result.code, [path.name for path in tmp_path.iterdir()]) == (1, ["model.safetensors"])
