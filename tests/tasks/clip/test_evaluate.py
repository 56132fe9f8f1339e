"""`multimodal zero-shot FOLDER --evaluate`."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tasks.clip.evaluate import measure
from tests.tasks.clip.tiny_clip import image_features, label_features
from tests.tasks.commands import Run

COLORS = ["red", "green", "blue", "white", "black", "dark_orange"]


@pytest.fixture
def colors(photos: list[str]) -> list[str]:
    """colors/NAME/N.png of 6 classes, of which class number n has n + 1 images."""
    for number, name in enumerate(COLORS):
        Path("colors", name).mkdir(parents=True)
        for at in range(number + 1):
            Image.new("RGB", (20 + at, 20), name.replace("_", "")).save(f"colors/{name}/{at}.png")
    return sorted(COLORS)


def evaluate(run: Run, *arguments: object) -> Any:
    return run("zero-shot", *arguments, "--checkpoint", "model.safetensors", "--evaluate")


def test_figures_are_what_the_model_says(run: Run, colors: list[str]) -> None:
    result = evaluate(run, "colors", "--json", "--batch-size", "4")
    figures = json.loads(result.out)
    paths = [str(path) for name in colors for path in sorted(Path("colors", name).iterdir())]
    truth = torch.tensor([index for index, name in enumerate(colors) for _ in Path("colors", name).iterdir()])
    names = [name.replace("_", " ") for name in colors]
    similarity = image_features(paths) @ label_features(names, ["a photo of a {}."]).T
    best = similarity.argsort(dim=1, descending=True)
    assert (result.code, figures["images"]) == (0, 21)
    assert figures["top1"] == pytest.approx(float((best[:, 0] == truth).double().mean()))
    assert figures["top5"] == pytest.approx(float((best[:, :5] == truth[:, None]).any(dim=1).double().mean()))
    confusion = torch.zeros(6, 6, dtype=torch.int64)
    for own, taken in zip(truth, best[:, 0], strict=True):
        confusion[own, taken] += 1
    assert figures["confusion"] == confusion.tolist()
    assert list(figures["per_class"]) == colors
    assert figures["per_class"]["dark_orange"]["label"] == "dark orange"
    shares = [entry["top1"] for entry in figures["per_class"].values()]
    assert figures["mean_per_class_top1"] == pytest.approx(sum(shares) / 6)
    assert shares == pytest.approx((confusion.diag() / confusion.sum(dim=1)).tolist())
    assert Image.open("confusion.png").size > (300, 300)


def test_measures_of_known_probabilities() -> None:
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    truth = torch.tensor([0, 1, 2, 2])
    result = measure(probabilities, truth, ["a", "b", "c"])
    assert result.top(1) == 0.5
    assert result.top(5) is None
    assert result.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]
    assert result.of_class(0, truth) == {"images": 1, "top1": 1.0, "top5": None, "taken_for": None}
    assert result.of_class(2, truth) == {"images": 2, "top1": 0.5, "top5": None, "taken_for": "b"}


def test_a_model_that_knows_nothing_scores_nothing() -> None:
    result = measure(torch.full((4, 6), 1 / 6), torch.tensor([0, 1, 2, 3]), list("abcdef"))
    assert (result.top(1), result.top(5)) == (0, 0)


def test_a_table(run: Run, colors: list[str]) -> None:
    result = evaluate(run, "colors", "--confusion", "matrix.png")
    lines = result.out.splitlines()
    assert (result.code, lines[0]) == (0, "21 images of 6 classes")
    assert [line.split()[0] for line in lines[1:4]] == ["top-1", "top-5", "mean"]
    assert [line.split()[:2] for line in lines[6:12]] == [[name, str(COLORS.index(name) + 1)] for name in colors]
    assert lines[-1] == "confusion matrix: matrix.png"
    assert Path("matrix.png").is_file()
    assert not Path("confusion.png").exists()


def test_rows_for_a_spreadsheet(run: Run, colors: list[str]) -> None:
    Path("labels.txt").write_text("\n".join(f"{name}, or so" for name in colors))
    out = evaluate(run, "colors", "--csv", "--labels-file", "labels.txt").out
    header, *rows = csv.reader(io.StringIO(out))
    assert header == ["class", "label", "images", "top1", "top5", "taken_for"]
    assert [row[:2] for row in rows] == [[name, f"{name}, or so"] for name in colors]


def test_the_test_split_is_measured_where_there_is_one(run: Run, colors: list[str]) -> None:
    Path("split").mkdir()
    Path("colors").rename("split/train")
    for name in COLORS[:2]:
        Path("split/val", name).mkdir(parents=True)
        Image.new("RGB", (9, 9), name).save(f"split/val/{name}/a.png")
    figures = json.loads(evaluate(run, "split", "--json").out)
    assert (figures["images"], list(figures["per_class"])) == (2, ["green", "red"])


def test_names_of_any_script(run: Run, colors: list[str]) -> None:
    for name in ("猫", "$x$", "🐈"):
        Path("colors", name).mkdir()
        Image.new("RGB", (9, 9)).save(f"colors/{name}/a.png")
    result = evaluate(run, "colors")
    assert (result.code, result.err) == (0, "")


def test_what_cannot_be_read_is_named_and_left_out(run: Run, colors: list[str]) -> None:
    Path("colors/blue/1.png").write_text("no image")
    Path("colors/blue/notes.txt").write_text("no image")
    result = evaluate(run, "colors", "--json")
    assert (result.code, json.loads(result.out)["images"]) == (1, 20)
    assert "colors/blue/1.png: " in result.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["colors", "photos"], "2 paths, expected one folder with a folder of images for each class"),
        (["photos"], "photos: 5 images but no folder of a class, expected a folder of images for each class"),
        (["nowhere"], "data root nowhere: no such folder"),
        (["one"], "one: one class, red, expected at least 2"),
        (["colors", "--labels", "a,b"], "2 labels, expected one for each of the 6 folders"),
        (["colors", "--threshold", "0.5"], "--threshold is not for --evaluate"),
        (["colors", "--top-k", "5"], "--top-k is not for --evaluate"),
        (["colors", "--confusion", "colors/red/0.png"], "--confusion colors/red/0.png: is read by this command"),
    ],
)
def test_mistakes(run: Run, colors: list[str], arguments: list[str], message: str) -> None:
    Path("one/red").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save("one/red/a.png")
    result = evaluate(run, *arguments)
    assert result.error.startswith(message)
    assert (result.code, result.out) == (2, "")
