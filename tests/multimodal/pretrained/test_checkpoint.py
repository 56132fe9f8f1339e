"""This suite's own files: what is written is read back, and what is not whole or not ours is refused in one line."""

import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint, build_config, load, load_weights, plain_config, read, save
from multimodal.pretrained import files as files_module

CONFIG = ViTConfig(
    embed_dim=16,
    depth=2,
    num_heads=2,
    image_size=(8, 12),
    patch_size=4,
    num_classes=3,
    drop_path=(0.0, 0.1),
    layer_scale=0.1,
    attention="local",
    attention_options={"window": 3},
)
PREPROCESS = {"size": [8, 12], "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic", "crop_pct": 0.9}


@pytest.fixture
def model() -> ViT:
    return ViT(CONFIG).eval()


@pytest.fixture
def checkpoint(model: ViT) -> Checkpoint:
    return Checkpoint.of("vit", model, preprocess=PREPROCESS, labels=["a", "b", "ü"])


def lightning(checkpoint: Checkpoint, **changes: Any) -> dict[str, Any]:
    """What a training run writes."""
    other = {"metrics.total": torch.zeros(1)}
    return {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"model.{key}": value for key, value in checkpoint.state_dict.items()} | other,
        "current_model_state": {f"model.{key}": value + 1 for key, value in checkpoint.state_dict.items()},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}],
        "multimodal": checkpoint.record() | changes,
    }


def assert_same(source: Any, model: ViT, checkpoint: Checkpoint) -> None:
    loaded = load(source, task="vit")
    x = torch.randn(2, 3, 8, 12)
    with torch.no_grad():
        assert torch.equal(loaded.model(x), model(x))
    assert isinstance(loaded.model, ViT)
    assert loaded.model.config == CONFIG
    assert not loaded.model.training
    assert loaded[1:] == ("vit", checkpoint.config, PREPROCESS, ["a", "b", "ü"], None)


def test_an_export_is_read_back(model: ViT, checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, checkpoint)
    assert_same(path, model, checkpoint)
    assert_same(str(path), model, checkpoint)
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert json.loads(file.metadata()["multimodal"]) == checkpoint.record()
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_is_read_by_its_best_checkpoint(model: ViT, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    worse = Checkpoint.of("vit", ViT(CONFIG))
    torch.save(lightning(worse), folder / "last.ckpt")
    torch.save(lightning(checkpoint), folder / "best.ckpt")
    assert_same(tmp_path, model, checkpoint)
    assert_same(folder / "best.ckpt", model, checkpoint)
    assert torch.equal(read(folder / "last.ckpt").state_dict["position"], worse.state_dict["position"])
    (folder / "best.ckpt").unlink()
    assert torch.equal(read(tmp_path).state_dict["position"], worse.state_dict["position"])
    (folder / "last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"a run without a checkpoint, expected checkpoints/best.ckpt or"):
        read(tmp_path)


def test_reading_needs_no_lightning(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pytorch_lightning", "lightning_fabric"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    torch.save(lightning(checkpoint), tmp_path / "x.ckpt")
    load(tmp_path / "x.ckpt")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/multimodal_was_here",)


def faulty_files(folder: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """File name -> what its error says; the files are written here."""
    whole = folder / "whole.ckpt"
    torch.save(lightning(checkpoint), whole)
    save(folder / "whole.safetensors", checkpoint)
    for kind in ("ckpt", "safetensors"):
        content = (folder / f"whole.{kind}").read_bytes()
        (folder / f"half.{kind}").write_bytes(content[: len(content) // 2])
        (folder / f"empty.{kind}").touch()
        (folder / f"text.{kind}").write_text("hello, this is not a checkpoint\n")
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, folder / "foreign.ckpt")
    torch.save([1, 2], folder / "list.ckpt")
    torch.save(lightning(checkpoint) | {"callbacks": Evil()}, folder / "evil.ckpt")
    (folder / "evil_pickle.ckpt").write_bytes(pickle.dumps(Evil(), protocol=2))
    torch.save(lightning(checkpoint, format=2), folder / "newer.ckpt")
    torch.save(lightning(checkpoint, format=None), folder / "none.ckpt")
    torch.save(lightning(checkpoint, labels=[1, 2, 3]), folder / "labels.ckpt")
    torch.save(lightning(checkpoint, config=None), folder / "config.ckpt")
    torch.save(lightning(checkpoint) | {"state_dict": {"net.w": torch.zeros(1)}}, folder / "weights.ckpt")
    torch.save(lightning(checkpoint) | {"multimodal": 3}, folder / "record.ckpt")
    save_file({"a": torch.zeros(1)}, folder / "foreign.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "json.safetensors", {"multimodal": "{"})
    (folder / "x.txt").write_text("hello")
    return {
        "half.ckpt": "the file is cut short, expected a whole PyTorch checkpoint",
        "half.safetensors": "damaged or no safetensors",
        "empty.ckpt": "the file is empty, expected a PyTorch checkpoint",
        "empty.safetensors": "the file is empty, expected a whole safetensors file",
        "text.ckpt": "not a PyTorch file, expected a checkpoint written by torch.save",
        "text.safetensors": "damaged or no safetensors",
        "foreign.ckpt": "another project's Lightning checkpoint, expected one that this suite wrote",
        "list.ckpt": "a PyTorch file of another kind, expected one that this suite wrote",
        "evil.ckpt": "refused, because it wants to run code (posix.system)",
        "evil_pickle.ckpt": "refused, because it ",
        "newer.ckpt": "format 2, expected at most 1",
        "none.ckpt": "has no format number, expected 1",
        "labels.ckpt": "its record has labels [1, 2, 3], expected a list of names",
        "config.ckpt": "its record has config None, expected fields by name",
        "weights.ckpt": "no weights of a model, expected keys model.",
        "record.ckpt": "its record 3 has no format number",
        "foreign.safetensors": "its keys (a, …) are of no known source",
        "json.safetensors": "metadata is not JSON",
        "x.txt": "a file ending in '.txt', expected a run folder, a .ckpt or .safetensors file",
        "missing.ckpt": "no such file or folder",
    }


def test_every_faulty_file_is_told_in_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name, message in faulty_files(tmp_path, checkpoint).items():
        with pytest.raises(ValueError, match=r".") as caught:
            read(tmp_path / name)
        assert message in str(caught.value), str(caught.value)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert not Path("/tmp/multimodal_was_here").exists()


def test_every_place_of_a_cut_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save(lightning(checkpoint), tmp_path / "whole.ckpt")
    save(tmp_path / "whole.safetensors", checkpoint)
    for kind in ("ckpt", "safetensors"):
        content = (tmp_path / f"whole.{kind}").read_bytes()
        path = tmp_path / f"cut.{kind}"
        for length in range(0, len(content), max(1, len(content) // 50)):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=str(path)) as caught:
                read(path)
            assert "\n" not in str(caught.value)


def test_another_task_is_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save(lightning(checkpoint), tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match=r"x.ckpt: holds a model of task 'vit', expected 'detr'"):
        read(tmp_path / "x.ckpt", task="detr")
    torch.save(lightning(checkpoint, task="detr"), tmp_path / "detr.ckpt")
    with pytest.raises(ValueError, match=r"detr.ckpt: holds a model of task 'detr', expected 'vit'"):
        load(tmp_path / "detr.ckpt", task="vit")
    torch.save(lightning(checkpoint, task="sing"), tmp_path / "sing.ckpt")
    with pytest.raises(ValueError, match=r"sing.ckpt: no model for task 'sing', expected one of: .*vit"):
        load(tmp_path / "sing.ckpt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dept": 3}, "unknown field 'dept', did you mean 'depth'?"),
        ({"xyz": 3}, "unknown field 'xyz'"),
        ({"depth": "3"}, "depth is '3', expected int"),
        ({"depth": True}, "depth is True, expected int"),
        ({"depth": -1}, "depth is -1, expected at least 1"),
        ({"pool": "max"}, "pool is 'max', expected 'cls' or 'mean'"),
        ({"image_size": [8, 8, 8]}, "image_size is [8, 8, 8], expected int | tuple[int, int]"),
        ({"layer_scale": "x"}, "layer_scale is 'x', expected float | None"),
        ({"drop_path": [0.1, "x"]}, "drop_path is [0.1, 'x'], expected float | tuple[float, ...]"),
        ({"attention_options": []}, "attention_options is [], expected dict[str, typing.Any]"),
        ({"num_classes": 4}, "mis-shaped head.bias [3] (expected [4]), head.weight [3, 16] (expected [4, 16])"),
        ({"num_registers": 1}, "mis-shaped position [7, 16] (expected [8, 16]), prefix [1, 16] (expected [2, 16])"),
        ({"qk_norm": True}, "missing encoder.blocks.0.self_attn.k_norm.bias, encoder.blocks.0.self_attn.k_norm.weight"),
        ({"layer_scale": None}, "unknown encoder.blocks.0.mlp_residual.layer_scale.gamma, "),
    ],
)
def test_a_config_that_does_not_fit_is_told(
    changes: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(lightning(checkpoint, config=checkpoint.config | changes), path)
    with pytest.raises(ValueError, match=str(path)) as caught:
        load(path)
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_from_before_a_field_existed_takes_its_default(checkpoint: Checkpoint, tmp_path: Path) -> None:
    older = {key: value for key, value in checkpoint.config.items() if key != "patch_norm"}
    torch.save(lightning(checkpoint, config=older), tmp_path / "x.ckpt")
    assert load(tmp_path / "x.ckpt").model.config == CONFIG


def test_a_config_is_plain_data_and_back() -> None:
    assert build_config("vit", json.loads(json.dumps(plain_config(CONFIG)))) == CONFIG
    assert build_config("vit", {"drop_path": 0, "image_size": 32}).drop_path == 0.0


def test_weights_that_do_not_fit_leave_the_model_alone(model: ViT) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {key: value + 1 for key, value in before.items() if key != "head.bias"}
    with pytest.raises(ValueError, match=r"here: the weights do not fit the model: missing head.bias$"):
        load_weights(model, state, "here")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_failed_write_leaves_the_old_file(
    checkpoint: Checkpoint, model: ViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    save(path, checkpoint)

    def full_disk(_descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(path, Checkpoint.of("vit", ViT(CONFIG)))
    assert list(tmp_path.iterdir()) == [path]
    assert_same(path, model, checkpoint)


def test_only_the_right_ending_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x.ckpt: the name ends in '.ckpt', expected .safetensors"):
        save(tmp_path / "x.ckpt", checkpoint)


def test_a_new_file_may_be_read_by_whom_the_umask_lets(checkpoint: Checkpoint, tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        save(tmp_path / "x.safetensors", checkpoint)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o644
