"""Whole runs: data in files, a validation without a box, and what was trained finding objects."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tasks.run import read_metrics
from tests.tasks.commands import PLAIN, QUIET, Run
from tests.tasks.detr.drawn import coco, write_coco

IDS = (3, 90)


def write_splits(root: Path, **changes: dict[str, Any]) -> Path:
    """COCO's layout; `changes` of val's annotations, by name."""
    for split, count in (("train", 9), ("val", 3), ("test", 3)):
        content = coco(count, ids=IDS, **(changes if split == "val" else {}))
        write_coco(root, content, f"annotations/instances_{split}.json", f"images/{split}")
    return root


def fit(run: Run, data: Path, place: Path) -> Path:
    """The folder of a run of two epochs."""
    flags = ("--data.root", data, "--data.batch_size", 4, "--trainer.max_epochs", 2)
    result = run("fit", "detr", *PLAIN["detr"], *flags, "--trainer.default_root_dir", place)
    assert result.code == 0, result.err
    (folder,) = (place / "detr").iterdir()
    return folder


def test_a_validation_without_a_box_is_not_measured(run: Run, tmp_path: Path) -> None:
    data = write_splits(tmp_path / "data", annotations=[])
    with pytest.warns(UserWarning, match=r"val/AP is n/a on the validation data: the run keeps last\.ckpt alone"):
        folder = fit(run, data, tmp_path)
    assert {path.name for path in (folder / "checkpoints").glob("*.ckpt")} == {"last.ckpt", "previous.ckpt"}
    names = {name for row in read_metrics(folder) for name in row}
    assert "val/loss" in names
    assert not [name for name in names if name.startswith(("val/AP", "val/AR"))]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["value"] == 0, "the test split has boxes"
    assert summary["checkpoint"].endswith("last.ckpt")
    shown = run("validate", "detr", "--checkpoint", folder, *QUIET)
    assert shown.code == 0, shown.err
    assert ["val/AP", "n/a"] in [line.split() for line in shown.out.splitlines()]


def test_a_test_without_a_box_has_no_value(run: Run, tmp_path: Path) -> None:
    data = write_splits(tmp_path / "data")
    path = data / "annotations/instances_test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    folder = fit(run, data, tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["metric"], summary["value"]) == ("AP", None)
    assert summary["checkpoint"].endswith("best.ckpt")


def test_what_was_trained_on_files_finds_objects_by_their_ids(run: Run, tmp_path: Path) -> None:
    data = write_splits(tmp_path / "data")
    folder = fit(run, data, tmp_path)
    names = {name for row in read_metrics(folder) for name in row}
    assert {"val/AP", "val/AP50", "val/AR100", "val/AP/cat", "val/AP/dog", "test/AP"} <= names
    out = tmp_path / "out.json"
    flags = ("--annotations", data / "annotations/instances_val.json", "--json", out, "--threshold", 0)
    result = run("predict", "detr", data / "images/val", "--checkpoint", folder, *flags, "--draw", tmp_path / "drawn")
    assert result.code == 0, result.err
    results = json.loads(out.read_text())
    assert {entry["image_id"] for entry in results} == {0, 1, 2}
    assert {entry["category_id"]: entry["category"] for entry in results}.items() <= {3: "cat", 90: "dog"}.items()
    assert Image.open(tmp_path / "drawn/0.png").size == (600, 400), "10 times as large"


def test_a_plain_detr_on_few_images_is_warned_of(run: Run, tmp_path: Path) -> None:
    plain = ("--model.queries", "learned", "--model.modulated", "false", "--trainer.fast_dev_run", "true")
    with pytest.warns(UserWarning, match=r"48 training images from scratch: the plain DETR hardly learns"):
        result = run("fit", "detr", *PLAIN["detr"], *plain)
    assert result.code == 0, result.err
