"""`multimodal probe`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.clip.probe import Labelled, linear_probe, nearest_neighbors
from tests.tasks.commands import Run

COLORS = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}


def draw(place: str, count: int, seed: int) -> None:
    """Noisy images of each colour."""
    rng = np.random.default_rng(seed)
    for name, color in COLORS.items():
        Path(place, name).mkdir(parents=True)
        for at in range(count):
            pixels = np.clip(np.array(color) + rng.normal(0, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(Path(place, name, f"{at}.png"))


def probe(run: Run, *arguments: object) -> Any:
    return run("probe", *arguments, "--checkpoint", "model.safetensors")


def test_colours_are_read_off_frozen_features(run: Run, photos: list[str]) -> None:
    draw("data/train", 10, seed=0)
    draw("data/test", 4, seed=1)
    result = probe(run, "data", "--json")
    expected = {"train_images": 30, "test_images": 12, "classes": 3, "linear": 1.0, "knn": 1.0}
    assert (result.code, json.loads(result.out)) == (0, expected)


def test_a_fifth_is_held_out_where_there_is_no_split(run: Run, photos: list[str]) -> None:
    draw("data", 10, seed=0)
    result = probe(run, "data", "--neighbors", "5")
    lines = result.out.splitlines()
    assert lines[0] == "24 images to learn from, 6 to measure with, 3 classes"
    assert [line.split() for line in lines[1:]] == [["linear", "probe", "100.00%"], ["k-NN", "100.00%"]]


def test_labels_without_meaning_are_not_learnt() -> None:
    rng = np.random.default_rng(0)
    known, asked = (
        Labelled(rng.normal(size=(400, 8)).astype(np.float32), [str(label) for label in rng.integers(0, 4, 400)])
        for _ in range(2)
    )
    for figure in (linear_probe(known, asked), nearest_neighbors(known, asked, 20)):
        assert figure == pytest.approx(0.25, abs=0.1)


def test_the_strength_is_chosen_on_held_out_images() -> None:
    """With more features than images, little decay learns the noise by heart."""
    rng = np.random.default_rng(0)

    def sample(count: int) -> Labelled:
        labels = rng.integers(0, 2, count)
        values = rng.normal(size=(count, 400)) + 0.25 * (2 * labels[:, None] - 1) * (np.arange(400) < 40)
        return Labelled(values.astype(np.float32), [str(label) for label in labels])

    assert linear_probe(sample(120), sample(1000)) > 0.75


def test_neighbours_vote_by_their_nearness() -> None:
    known = Labelled(np.array([[1, 0], [0.6, 0.8], [0.6, 0.8]], np.float32), ["a", "b", "b"])
    asked = Labelled(np.array([[1, 0.05]], np.float32), ["a"])
    assert nearest_neighbors(known, asked, 3) == 1.0


def test_one_image_of_a_class_is_learnt_from(run: Run, photos: list[str]) -> None:
    draw("data", 4, seed=0)
    Path("data/grey").mkdir()
    Image.new("RGB", (16, 16), "grey").save("data/grey/a.png")
    result = probe(run, "data", "--json")
    assert result.code == 0
    assert json.loads(result.out)["train_images"] == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "one: one class, red, expected at least 2"),
        (["single"], "single: one image of each class, expected one more to measure with"),
        (["data", "photos"], "2 paths, expected one folder with a folder of images for each class"),
        (["photos"], "photos: 5 images but no folder of a class"),
        (["tested"], "tested: no train/ beside test/, expected images to learn from"),
    ],
)
def test_mistakes(run: Run, photos: list[str], arguments: list[str], message: str) -> None:
    for place in ("one/red", "single/red", "single/blue", "tested/test/red"):
        Path(place).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(f"{place}/a.png")
    result = probe(run, *arguments)
    assert result.error.startswith(message)
    assert (result.code, result.out) == (2, "")
