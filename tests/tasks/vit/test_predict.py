"""`multimodal predict vit`."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from multimodal import pretrained
from multimodal.data import ImagePreprocess, eval_transform, load_image
from tests.tasks.commands import Run


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Five images in digits/."""
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()
    paths = [Path("digits", f"{index}.png") for index in range(5)]
    for path, pixels in zip(paths, load_digits().images, strict=False):
        Image.fromarray((pixels * (255 / 16)).round().astype(np.uint8)).save(path)
    return paths


def _paths(out: str) -> list[str]:
    return [json.loads(line)["path"] for line in out.splitlines()]


def test_a_table_names_classes_and_probabilities(run: Run, trained: Path, digits: list[Path]) -> None:
    result = run("predict", "vit", digits[0], "--checkpoint", trained, "--top-k", "3")
    path, *rows = result.out.splitlines()
    assert (result.code, path, len(rows)) == (0, "digits/0.png", 3)
    assert all(row.split()[0].endswith("%") and row.split()[1] in "0123456789" for row in rows)


def test_json_holds_what_the_model_says(run: Run, trained: Path, digits: list[Path]) -> None:
    out = run("predict", "vit", "digits", "--checkpoint", trained, "--json", "--batch-size", "2", "--top-k", "10").out
    assert _paths(out) == [str(path) for path in digits]
    loaded = pretrained.load(trained)
    preprocess = ImagePreprocess.from_dict(loaded.preprocess)
    image = eval_transform(preprocess)(load_image(digits[4], preprocess.channels))
    expected = loaded.model(image[None]).softmax(dim=-1)[0]
    predictions = json.loads(out.splitlines()[4])["predictions"]
    assert [entry["probability"] for entry in predictions] == pytest.approx(
        sorted(expected.tolist(), reverse=True), abs=1e-5
    )
    assert predictions[0]["label"] == str(int(expected.argmax()))


@pytest.mark.parametrize("given", [["-"], []])
def test_a_list_on_standard_input(
    run: Run, trained: Path, digits: list[Path], monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("digits/1.png\n\ndigits/3.png\n"))
    out = run("predict", "vit", *given, "--checkpoint", trained, "--json").out
    assert _paths(out) == ["digits/1.png", "digits/3.png"]


def test_what_cannot_be_read_is_named_and_the_rest_predicted(run: Run, trained: Path, digits: list[Path]) -> None:
    digits[1].write_text("no image")
    digits[3].write_bytes(digits[3].read_bytes()[:60])
    result = run("predict", "vit", "digits", "nowhere.png", "--checkpoint", trained, "--json")
    assert result.code == 1
    assert _paths(result.out) == ["digits/0.png", "digits/2.png", "digits/4.png"]
    lines = result.err.splitlines()
    assert len(lines) == 3
    for line, path in zip(lines, ("digits/1.png", "digits/3.png", "nowhere.png"), strict=True):
        assert line.startswith("multimodal: error: ")
        assert path in line


def test_images_of_other_modes_and_sizes(run: Run, trained: Path, digits: list[Path]) -> None:
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"):
        Image.new(mode, (40, 28)).save(f"digits/mode {mode.replace(';', '')}.{'tiff' if mode == 'CMYK' else 'png'}")
    result = run("predict", "vit", "digits", "--checkpoint", trained, "--json")
    assert (result.code, len(_paths(result.out))) == (0, 13)


def test_nothing_to_predict(run: Run, trained: Path, digits: list[Path]) -> None:
    Path("empty").mkdir()
    result = run("predict", "vit", "empty", "--checkpoint", trained)
    assert result.error == "no image found in empty"
    assert result.code == 1


def test_the_checkpoint_of_another_task(run: Run, trained: Path, digits: list[Path]) -> None:
    saved = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)
    saved["multimodal"]["task"] = "detr"
    torch.save(saved, "other.ckpt")
    assert "task 'detr', expected 'vit'" in run("predict", "vit", "digits", "--checkpoint", "other.ckpt").error


def test_a_checkpoint_that_lacks_the_preprocessing(run: Run, trained: Path, digits: list[Path]) -> None:
    saved = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)
    saved["multimodal"]["preprocess"] = None
    torch.save(saved, "bare.ckpt")
    result = run("predict", "vit", "digits", "--checkpoint", "bare.ckpt")
    assert result.error == "bare.ckpt: lacks how its images were preprocessed, which prediction needs"


def test_an_unknown_device(run: Run, trained: Path, digits: list[Path]) -> None:
    assert "--device foo: " in run("predict", "vit", "digits", "--checkpoint", trained, "--device", "foo").error
