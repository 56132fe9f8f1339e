"""`multimodal predict detr`."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from multimodal import pretrained
from multimodal.data import DetectionPreprocess, detection_transform, load_image
from multimodal.models.detr import DETR
from multimodal.pretrained import Checkpoint, build_config
from tasks.detr.postprocess import detections
from tests.tasks.commands import Run

LABELS = ["ant", "bee", "cat"]
STACK = {"embed_dim": 16, "depth": 1, "num_heads": 2}
PREPROCESS = {"shortest_edge": 32, "longest_edge": 64}


def checkpoint(scores: str = "softmax", **preprocess: Any) -> Checkpoint:
    """A random model that finds something everywhere."""
    values = {"num_classes": 3, "num_queries": 6, "backbone": "conv", "encoder": STACK, "decoder": STACK}
    torch.manual_seed(0)
    model = DETR(build_config("detr", {**values, "scores": scores}))
    torch.nn.init.normal_(model.class_head.weight, std=2)
    torch.nn.init.normal_(model.box_head.layers[-1].weight, std=1)
    record = DetectionPreprocess(**{**PREPROCESS, **preprocess}).to_dict()
    return Checkpoint.of("detr", model, preprocess=record, labels=LABELS)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Images of several sizes in images/, and model.safetensors."""
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    rng = np.random.default_rng(0)
    for at, (height, width) in enumerate(((40, 60), (60, 40), (40, 60), (33, 200), (1, 1))):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(f"images/{at}.png")
    pretrained.save("model.safetensors", checkpoint())
    return [f"images/{at}.png" for at in range(5)]


def predict(run: Run, *arguments: object) -> Any:
    return run("predict", "detr", "--checkpoint", "model.safetensors", *arguments)


def found(run: Run, *arguments: object) -> list[dict[str, Any]]:
    """What --json writes."""
    assert predict(run, *arguments, "--json", "out.json").code == 0
    results: list[dict[str, Any]] = json.loads(Path("out.json").read_text())
    return results


def test_each_image_is_printed_with_what_it_shows(run: Run, images: list[str]) -> None:
    result = predict(run, *images, "--threshold", "0.3")
    assert result.code == 0
    lines = result.out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == images
    for line in lines:
        if line.startswith("  ") and "nothing" not in line:
            score, label, *box = line.split()
            assert float(score.removesuffix("%")) >= 30
            assert label in LABELS
            assert len([float(value) for value in box]) == 4


def test_nothing_found_is_said(run: Run, images: list[str]) -> None:
    result = predict(run, images[0], "--threshold", "1", "--json", "out.json", "--draw", "out")
    assert (result.code, result.out) == (0, "images/0.png\n  nothing with a score of at least 1\n")
    assert json.loads(Path("out.json").read_text()) == []
    assert Path("out/0.png").is_file()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_json_holds_what_the_model_says(run: Run, images: list[str], scores: str) -> None:
    pretrained.save("model.safetensors", checkpoint(scores))
    results = found(run, *images, "--threshold", "0")
    loaded = pretrained.load("model.safetensors")
    transform = detection_transform(DetectionPreprocess.from_dict(loaded.preprocess))
    for at, path in enumerate(images):
        image = load_image(path)
        with torch.no_grad():
            output = loaded.model(transform(image)[None])
        (expected,) = detections(output, torch.tensor([[image.height, image.width]]), scores=scores)
        order = expected["scores"].argsort(descending=True, stable=True)
        ours = [entry for entry in results if entry["file_name"] == path]
        assert {entry["image_id"] for entry in ours} == {at}
        assert [entry["score"] for entry in ours] == pytest.approx(expected["scores"][order].tolist(), abs=1e-5)
        assert [entry["category_id"] for entry in ours] == expected["labels"][order].tolist()
        assert [entry["category"] for entry in ours] == [LABELS[entry["category_id"]] for entry in ours]
        x0, y0, x1, y1 = expected["boxes"][order].unbind(1)
        boxes = torch.stack([x0, y0, x1 - x0, y1 - y0], 1)
        assert torch.allclose(torch.tensor([entry["bbox"] for entry in ours]), boxes, atol=1e-3)


def test_an_image_does_not_depend_on_the_others(run: Run, images: list[str]) -> None:
    together = found(run, *images, "--threshold", "0", "--batch-size", "5")
    for path in images:
        alone = found(run, path, "--threshold", "0")
        ours = [entry for entry in together if entry["file_name"] == path]
        assert [entry["score"] for entry in ours] == pytest.approx([entry["score"] for entry in alone], abs=1e-6)
        boxes = [[value for entry in entries for value in entry["bbox"]] for entries in (ours, alone)]
        assert boxes[0] == pytest.approx(boxes[1], abs=1e-3)


def test_the_threshold_is_a_least_score(run: Run, images: list[str]) -> None:
    everything = found(run, *images, "--threshold", "0")
    least = sorted(entry["score"] for entry in everything)[len(everything) // 2]
    kept = found(run, *images, "--threshold", least - 1e-6)
    assert kept == [entry for entry in everything if entry["score"] >= least]


@pytest.mark.parametrize("threshold", ["-0.1", "1.5", "nan", "half"])
def test_a_threshold_that_is_no_score(run: Run, images: list[str], threshold: str) -> None:
    result = predict(run, images[0], f"--threshold={threshold}")
    assert result.error == f"argument --threshold: {threshold!r} is not a number from 0 to 1"
    assert result.code == 2


def test_original_ids_that_pycocotools_takes(run: Run, images: list[str]) -> None:
    pretrained.save("model.safetensors", checkpoint(category_ids=(3, 90, 7)))
    entries = [
        {"id": 100 - at, "file_name": Path(path).name, "height": 9, "width": 9} for at, path in enumerate(images)
    ]
    categories = [{"id": number, "name": name} for number, name in zip((3, 90, 7), LABELS, strict=True)]
    content = {"images": entries, "annotations": [], "categories": categories, "info": {}}
    Path("truth.json").write_text(json.dumps(content))
    results = found(run, *images, "--threshold", "0", "--annotations", "truth.json")
    assert {entry["image_id"] for entry in results} == {100, 99, 98, 97, 96}
    assert {entry["category_id"]: entry["category"] for entry in results}.items() <= {
        3: "ant",
        90: "bee",
        7: "cat",
    }.items()
    with contextlib.redirect_stdout(io.StringIO()):
        assert len(COCO("truth.json").loadRes("out.json").anns) == len(results) == 30


def test_the_longest_file_name_decides(run: Run, images: list[str]) -> None:
    names = {"0.png": 5, "images/0.png": 6, "other/1.png": 7, "1.png": 8}
    Path("truth.json").write_text(json.dumps({"images": [{"id": i, "file_name": name} for name, i in names.items()]}))
    results = found(run, *images[:2], "--threshold", "0", "--annotations", "truth.json")
    assert {entry["file_name"]: entry["image_id"] for entry in results} == {"images/0.png": 6, "images/1.png": 8}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [{"id": 1', "truth.json: not JSON"),
        ('{"images": 3}', "no list of images in it, expected COCO annotations"),
        ('{"images": [{"id": 1}]}', "images[0] lacks an id or a file_name"),
        ('{"images": [{"id": 1, "file_name": "1.png"}]}', "has no image images/0.png, expected its file_name"),
        (
            '{"images": [{"id": 1, "file_name": "0.png"}, {"id": 2, "file_name": "0.png"}]}',
            "two images have the file_name",
        ),
        ('{"images": [{"id": 1, "file_name": "0.png"}]}', "images/0.png and more/0.png both are its image 0.png"),
    ],
)
def test_annotations_that_do_not_fit(run: Run, images: list[str], content: str, message: str) -> None:
    Path("truth.json").write_text(content)
    result = predict(run, images[0], "more/0.png", "--annotations", "truth.json")
    assert message in result.error
    assert result.code == 2


def test_what_cannot_be_read_is_named_and_the_rest_predicted(run: Run, images: list[str]) -> None:
    Path(images[1]).write_text("no image")
    result = predict(run, *images, "nowhere.png", "--threshold", "0", "--json", "out.json", "--draw", "out")
    assert result.code == 1
    first, second = result.err.splitlines()
    assert first.startswith("multimodal: error: images/1.png: ")
    assert second.startswith("multimodal: error: nowhere.png: ")
    assert {entry["image_id"] for entry in json.loads(Path("out.json").read_text())} == {0, 2, 3, 4}
    assert sorted(path.name for path in Path("out").iterdir()) == ["0.png", "2.png", "3.png", "4.png"]


def test_boxes_are_drawn_and_the_images_left_alone(run: Run, images: list[str]) -> None:
    before = [Path(path).read_bytes() for path in images]
    assert predict(run, "images", "--draw", "out/deep", "--threshold", "0").code == 0
    assert [Path(path).read_bytes() for path in images] == before
    for path in images:
        original, drawn = Image.open(path), Image.open(Path("out/deep", Path(path).name))
        factor = drawn.size[0] // original.size[0]
        assert drawn.size == tuple(factor * side for side in original.size)
        enlarged = original.resize(drawn.size, Image.Resampling.NEAREST)
        assert np.asarray(enlarged).tobytes() != np.asarray(drawn).tobytes()


def test_boxes_belong_to_the_upright_image(run: Run, images: list[str]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.open(images[0]).save("turned.png", exif=exif)
    assert predict(run, "turned.png", "--draw", "out").code == 0
    width, height = Image.open("out/turned.png").size
    assert width / height == 40 / 60


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draw", "images"], "--draw images: images/0.png lies there, expected a folder without images to predict"),
        (
            ["--json", "nowhere/out.json"],
            "--json nowhere/out.json: no such folder, expected a file in one that there is",
        ),
        (["--json", "images"], "--json images: a folder, expected a file"),
        (["--json", "images/0.png"], "--json images/0.png: is read by this command, expected another file"),
        (["--device", "foo"], "--device foo: "),
        (["--batch-size", "0"], "argument --batch-size: '0' is not a whole number of at least 1"),
    ],
)
def test_a_mistake_is_told_before_anything_is_predicted(
    run: Run, images: list[str], flags: list[str], message: str
) -> None:
    result = predict(run, images[0], *flags)
    assert message in result.error
    assert (result.code, result.out) == (2, "")


def test_an_image_that_is_given_twice_counts_once(run: Run, images: list[str]) -> None:
    assert len(found(run, images[0], "images", "--threshold", "0")) == 30


def test_a_checkpoint_that_lacks_the_preprocessing(run: Run, images: list[str]) -> None:
    pretrained.save("model.safetensors", replace(checkpoint(), preprocess=None))
    error = predict(run, images[0]).error
    assert error == "model.safetensors: lacks how its images were preprocessed, which prediction needs"
