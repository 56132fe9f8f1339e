"""`multimodal export`: what is written opens again and answers as the model does, for every task and format."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multimodal import pretrained
from multimodal.data import CLIPTokenizer, DetectionPreprocess, ImagePreprocess
from multimodal.data.audio import LogMel
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models import model_classes
from multimodal.models.detr import LAYERS
from multimodal.models.whisper import LAYERS as WHISPER_LAYERS
from multimodal.pretrained import Checkpoint, build_config
from tasks import export, formats, registry
from tasks.dt.preprocess import TrajectoryPreprocess
from tasks.registry import Format, Task
from tests.tasks.commands import Run

SPEECH = SpeechTokenizer.from_characters("abc ")
TOKENIZERS = {"clip": CLIPTokenizer().to_dict(), "whisper": SPEECH.to_dict()}
TINY: dict[str, dict[str, Any]] = {
    "clip": {
        "embed_dim": 8,
        "vision": {
            "image_size": 16,
            "patch_size": 4,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "num_classes": 0,
            "patch_bias": False,
            "pre_norm": True,
            "norm_eps": 1e-5,
        },
        "text": {"embed_dim": 32, "depth": 2, "num_heads": 2},
    },
    "detr": {
        "num_classes": 5,
        "num_queries": 4,
        "backbone": "conv",
        "encoder": {**LAYERS, "embed_dim": 32, "depth": 1, "mlp_ratio": 2, "final_norm": False},
        "decoder": {**LAYERS, "embed_dim": 32, "depth": 1, "mlp_ratio": 2},
    },
    "dt": {"state_shape": [3], "action_dim": 2, "embed_dim": 32, "depth": 2, "max_episode_length": 30},
    "vit": {"image_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5},
    "whisper": {
        "num_mels": 8,
        "audio_context": 12,
        "text_context": 10,
        "vocab_size": SPEECH.vocab_size,
        "encoder": {**WHISPER_LAYERS, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "decoder": {**WHISPER_LAYERS, "embed_dim": 32, "depth": 2, "num_heads": 2},
    },
}
"""A model of each task that all of its formats can express, or nearly."""
CHANGES: dict[tuple[str, str], dict[str, Any]] = {
    ("detr", "facebook"): {"backbone": "resnet18"},
    ("detr", "huggingface"): {"backbone": "test_resnet"},
}
"""By task and format, what only that format asks for."""
TASKS = registry.discover()[0]
EVERY = [pytest.param(task, form, id=f"{task.name}-{form.name}") for task in TASKS.values() for form in task.formats]
PREPROCESS: dict[str, dict[str, Any]] = {
    "clip": ImagePreprocess(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3).to_dict(),
    "detr": DetectionPreprocess().to_dict(),
    "dt": TrajectoryPreprocess(
        state_mean=(0.0, 1.0, 2.0),
        state_std=(1.0, 2.0, 3.0),
        action_low=None,
        action_high=None,
        return_scale=10.0,
        return_range=(1.0, 9.0),
        max_episode_length=30,
    ).to_dict(),
    "vit": ImagePreprocess(size=(16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), crop_pct=0.875).to_dict(),
    "whisper": LogMel(num_mels=8).to_dict(),
}
LABELS = ["ant", "bee", "cat", "dog", "eel"]


def tiny(task: str = "vit", **changes: Any) -> Checkpoint:
    """A random model as a checkpoint."""
    torch.manual_seed(0)
    model = model_classes(task)[0](build_config(task, TINY[task] | changes))
    tokenizer = TOKENIZERS.get(task)
    return Checkpoint.of(task, model, preprocess=PREPROCESS[task], labels=LABELS, tokenizer=tokenizer)


def form_of(name: str) -> Format:
    return next(form for form in TASKS["vit"].formats if form.name == name)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint in the working directory."""
    monkeypatch.chdir(tmp_path)
    pretrained.save("model.safetensors", tiny())
    return "model.safetensors"


def _path(form: Format, folder: Path) -> Path:
    return folder / f"out{form.suffix or ''}"


# ------------------------------------------------------------------------------------------------ every task and format


@pytest.mark.parametrize(("task", "form"), EVERY)
def test_every_format_of_every_task_answers_as_the_model_does(task: Task, form: Format, tmp_path: Path) -> None:
    checkpoint = tiny(task.name, **CHANGES.get((task.name, form.name), {}))
    out = _path(form, tmp_path)
    assert export.export(checkpoint, form, out) <= 1e-5
    model = formats.as_function(formats.build_model(checkpoint, "test"))
    opened = form.load(form.open)(out)
    for batch_size in (2, 5):  # others than those of the check at export
        inputs = formats.example_of(checkpoint, batch_size).inputs.values()
        for found, expected in zip(opened(*inputs), model(*inputs), strict=True):
            assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_an_example_feeds_the_model_and_leaves_the_generator_alone(task: Task) -> None:
    checkpoint = tiny(task.name)
    before = torch.get_rng_state()
    example = formats.example_of(checkpoint, 3)
    assert torch.equal(before, torch.get_rng_state())
    outputs = formats.as_function(formats.build_model(checkpoint, "test"))(*example.inputs.values())
    assert len(outputs) == len(example.outputs)
    assert all(tensor.dim() == 0 or len(tensor) == 3 for tensor in outputs)
    assert all(len(tensor) == 3 for tensor in example.inputs.values())
    again = formats.example_of(checkpoint, 3)
    assert all(torch.equal(again.inputs[name], value) for name, value in example.inputs.items())


@pytest.mark.parametrize(("task", "form"), EVERY)
def test_help_names_every_format(run: Run, task: Task, form: Format) -> None:
    assert f"  {form.name} " in run("export", task.name, "--help").out
    assert all(form.name in run(*command).out for command in (("--help",), ("export", "--help")))
    listed = {entry["name"]: entry["formats"] for entry in json.loads(run("tasks", "--json").out)}
    assert form.name in [entry["name"] for entry in listed[task.name]]


# -------------------------------------------------------------------------------------------------------- the command


def test_the_command_says_what_it_wrote(run: Run, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    result = run("export", "vit", "--checkpoint", trained, "--to", "safetensors", out)
    assert result.code == 0
    shown = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert shown == {
        "task": "vit",
        "format": "safetensors",
        "wrote": str(out),
        "bytes": f"{out.stat().st_size:,}",
        "difference": "0.0e+00",
    }
    written, original = pretrained.read(out), pretrained.read(trained)
    assert written.record() == original.record()
    assert all(torch.equal(written.state_dict[key], value) for key, value in original.state_dict.items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--to onxx m.onnx", "--to onxx: unknown format, did you mean onnx?"),
        ("--to onnx m.pt", "OUT m.pt ends in '.pt', expected .onnx for --to onnx"),
        ("--to onnx m", "OUT m ends in 'nothing', expected .onnx for --to onnx"),
        ("--to onnx m.onnx/", "OUT m.onnx/ ends in '.onnx', expected .onnx for --to onnx"),
        ("--to torch-export m.pt", "OUT m.pt ends in '.pt', expected .pt2 for --to torch-export"),
        ("--to timm m.onnx", "OUT m.onnx ends in '.onnx', but --to timm writes a folder"),
        ("--to timm .", "OUT '.' is no name, expected that of a folder"),
        ("--to timm ..", "OUT '..' is no name, expected that of a folder"),
        ("--to onnx nowhere/m.onnx", "nowhere: no such folder, expected a folder"),
        ("--to onnx model.safetensors/m.onnx", "model.safetensors: a file, expected a folder"),
        ("--to safetensors model.safetensors", "model.safetensors: exists already; --overwrite replaces what was"),
        ("--to timm taken", "taken: exists already; --overwrite replaces what was exported before"),
        ("--to timm afile --overwrite", "afile: a file, which --to timm does not replace by a folder"),
        ("--to onnx folder.onnx --overwrite", "folder.onnx: a folder, which --to onnx does not replace by a file"),
        ("--to onnx", "the following arguments are required: OUT"),
        ("m.onnx", "the following arguments are required: --to"),
        ("--to onnx --overwrit m.onnx", "unknown flag --overwrit: did you mean --overwrite?"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(run: Run, source: str, arguments: str, message: str) -> None:
    for folder in ("taken", "folder.onnx"):
        Path(folder).mkdir()
        Path(folder, "notes.txt").touch()
    Path("afile").touch()
    before = sorted(Path.cwd().rglob("*"))
    result = run("export", "vit", "--checkpoint", source, *arguments.split())
    assert message in result.error
    assert result.code == 2
    assert sorted(Path.cwd().rglob("*")) == before


def test_where_nothing_can_be_written(run: Run, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    result = run("export", "vit", "--checkpoint", source, "--to", "onnx", "m.onnx")
    assert result.error == "m.onnx: nothing can be written there (Permission denied)"
    assert result.code == 2


def test_a_disk_that_is_full(run: Run, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for name in ("safetensors", "timm", "torch-export"):
        out = _path(form_of(name), Path())
        result = run("export", "vit", "--checkpoint", source, "--to", name, out)
        assert result.error == f"{out}: not written (No space left on device)"
        assert result.code == 1
    assert list(Path().iterdir()) == [Path(source)]


def test_a_checkpoint_of_another_task_is_refused(run: Run, tmp_path: Path) -> None:
    pretrained.save(tmp_path / "other.safetensors", replace(tiny(), task="other"))
    out = tmp_path / "m.onnx"
    result = run("export", "vit", "--checkpoint", tmp_path / "other.safetensors", "--to", "onnx", out)
    assert "holds a model of task 'other', expected 'vit'" in result.error
    assert (result.code, out.exists()) == (2, False)


def test_weights_that_do_not_fit_are_named(run: Run, tmp_path: Path) -> None:
    checkpoint = tiny()
    del checkpoint.state_dict["head.bias"]
    pretrained.save(tmp_path / "cut.safetensors", checkpoint)
    result = run("export", "vit", "--checkpoint", tmp_path / "cut.safetensors", "--to", "timm", tmp_path / "out")
    assert result.error.endswith("the weights do not fit the model: missing head.bias")
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------- replacing, failing


@pytest.mark.parametrize("name", ["torch-export", "timm"])
def test_overwrite_replaces_an_earlier_export(run: Run, source: str, name: str) -> None:
    form = form_of(name)
    out = _path(form, Path())
    export.export(tiny(num_classes=3), form, out)
    command = ("export", "vit", "--checkpoint", source, "--to", name, out)
    assert "exists already" in run(*command).error
    assert run(*command, "--overwrite").code == 0
    (logits,) = form.load(form.open)(out)(torch.zeros(1, 3, 16, 16))
    assert logits.shape == (1, 5)
    assert sorted(path.name for path in Path().iterdir()) == sorted([out.name, source])


def test_a_folder_with_other_files_is_not_replaced(run: Run, source: str) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    result = run("export", "vit", "--checkpoint", source, "--to", "timm", "out", "--overwrite")
    assert result.error == "out: holds notes.txt, which this export does not write; not replaced"
    assert [path.name for path in Path("out").iterdir()] == ["notes.txt"]


def test_an_empty_folder_is_filled(run: Run, source: str) -> None:
    Path("out").mkdir()
    assert run("export", "vit", "--checkpoint", source, "--to", "timm", "out").code == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["config.json", "model.safetensors"]


def test_the_old_folder_stays_where_the_new_one_cannot_be_put(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, out = form_of("timm"), tmp_path / "out"
    export.export(tiny(), form, out)
    before = (out / "config.json").read_bytes()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    staged = tmp_path / "stage" / "out"
    shutil.copytree(out, staged)
    with pytest.raises(OSError, match="No space left"):
        export._install(staged, out, overwrite=True)
    assert (out / "config.json").read_bytes() == before


def _stub(write: Callable[[Checkpoint, Path], None], opened: Callable[[Path], formats.Model]) -> Format:
    class Stub(Format):
        def load(self, target: str) -> Any:
            return write if target == "write" else opened

    return Stub(name="stub", help="", write="write", open="open", suffix=".onnx")


def _touch(checkpoint: Checkpoint, out: Path) -> None:
    out.write_text("new")


def _answers(change: Callable[[Tensor], Tensor]) -> Callable[[Path], formats.Model]:
    model = formats.as_function(formats.build_model(tiny(), "test"))
    return lambda out: lambda *inputs: tuple(change(output) for output in model(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 1, "outputs differ by 1.0e+00, expected at most 1e-04"),
        (lambda x: x * float("nan"), "outputs differ by nan, expected at most 1e-04"),
        (lambda x: x[:1], "what was written does not run (output (1, 5) torch.float32, expected (3, 5) torch.float32)"),
    ],
)
def test_an_export_that_answers_otherwise_is_not_left_behind(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str
) -> None:
    out = tmp_path / "m.onnx"
    out.write_text("old")
    with pytest.raises(ValueError, match="--to stub: ") as caught:
        export.export(tiny(), _stub(_touch, _answers(change)), out, overwrite=True)
    assert message in str(caught.value)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("m.onnx", "old")]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def half(checkpoint: Checkpoint, out: Path) -> None:
        out.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export.export(tiny(), _stub(half, _answers(lambda x: x)), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_large_weights_that_lie_beside_a_file_come_along(tmp_path: Path) -> None:
    def two(checkpoint: Checkpoint, out: Path) -> None:
        out.write_text("graph")
        out.with_name(f"{out.name}.data").write_text("weights")

    export.export(tiny(), _stub(two, _answers(lambda x: x)), tmp_path / "m.onnx")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m.onnx": "graph", "m.onnx.data": "weights"}
    assert export._size(tmp_path / "m.onnx") == 12


def test_a_missing_extra_is_told_with_the_command(run: Run, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "tasks.formats_onnx", raising=False)
    result = run("export", "vit", "--checkpoint", source, "--to", "onnx", "m.onnx")
    assert result.error == "--to onnx needs onnxruntime: pip install 'multimodal-transformer-suite[export]'"
    assert sorted(Path().iterdir()) == [Path(source)]


@pytest.mark.parametrize("name", ["onnx", "torch-export"])
@pytest.mark.parametrize(
    "forward",
    [
        lambda self, images: images.flatten(1)[:, : int(images.sum().item())],
        lambda self, images: images.flatten(1) if images.shape[0] == 2 else images,
    ],
    ids=["data", "batch"],
)
def test_a_model_that_is_no_graph_is_one_line(
    run: Run, source: str, monkeypatch: pytest.MonkeyPatch, name: str, forward: Callable[..., Tensor]
) -> None:
    model: type[nn.Module] = model_classes("vit")[0]
    monkeypatch.setattr(model, "forward", forward)
    out = _path(form_of(name), Path())
    result = run("export", "vit", "--checkpoint", source, "--to", name, out)
    assert "torch.export cannot make a graph of this model (" in result.error
    assert len(result.error) < 400
    assert not out.exists()
