"""Every recipe of configs/: trained for two steps through the command line, and refused without the data it needs."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml
from PIL import Image

from tasks.run import read_metrics
from tests.tasks.commands import QUIET, ROOT, Run
from tests.tasks.detr.drawn import coco, write_coco
from tests.tasks.dt.recorded import write_npz

RECIPES = sorted((ROOT / "configs").glob("*.yaml"), key=lambda path: path.name)
NEEDS_ROOT = [path for path in RECIPES if "dataset" in yaml.safe_load(path.read_text()).get("data", {})]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, with train and val."""
    for split, count in (("train", 6), ("val", 2)):
        for label in ("a", "b"):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                seed = hashlib.sha256(f"{folder}{index}".encode()).digest()[0]
                pixels = np.random.default_rng(seed).integers(0, 256, (70, 90, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "photos"


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Images with boxes of two classes, in COCO's format."""
    return write_coco(tmp_path / "boxes", coco(12)).parent


@pytest.fixture
def episodes(tmp_path: Path) -> Path:
    """Files of D4RL's form, under the names that the recipes ask for; no environment has their spaces."""
    for name in ("hopper", "halfcheetah"):
        for kind in ("expert", "medium"):
            write_npz(tmp_path / "rl" / f"{name}-{kind}.npz", [30, 20, 10])
    return tmp_path / "rl"


@pytest.fixture
def captioned(tmp_path: Path) -> Path:
    """A table of captions beside images, enough of them for a tenth to be held out."""
    folder = tmp_path / "captioned"
    folder.mkdir()
    rows = ["file\tcaption"]
    for number in range(40):
        Image.fromarray(np.full((9, 9, 3), number, np.uint8)).save(folder / f"{number}.png")
        rows.append(f"{number}.png\tthing number {number}")
    (folder / "captions.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A table of recordings, half a second of noise each."""
    folder = tmp_path / "spoken"
    folder.mkdir()
    rows = ["file\ttext"]
    for number in range(20):
        soundfile.write(folder / f"{number}.wav", 0.1 * np.random.default_rng(number).standard_normal(4000), 8000)
        rows.append(f"{number}.wav\t{'two words' if number % 2 else 'three little words'}")
    (folder / "transcripts.tsv").write_text("\n".join(rows) + "\n")
    return folder


def test_there_are_recipes() -> None:
    assert {path.stem for path in NEEDS_ROOT} >= {"clip_emoji", "vit_cifar10", "vit_clothing", "vit_imagenet"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(recipe: Path, tmp_path: Path, run: Run, request: pytest.FixtureRequest) -> None:
    values = yaml.safe_load(recipe.read_text())
    flags = []
    if recipe in NEEDS_ROOT:
        fixtures = {"folder": "photos", "coco": "boxes", "captions": "captioned", "d4rl": "episodes", "table": "spoken"}
        flags += ["--data.root", request.getfixturevalue(fixtures.get(values["data"]["dataset"], "cifar"))]
    if "backbone_weights" in values["model"]:  # which are downloaded
        flags += ["--model.backbone_weights", "null"]
    task = recipe.stem.split("_")[0]
    if recipe in NEEDS_ROOT and task == "detr":
        flags += ["--data.shortest_edge", 96, "--data.longest_edge", 160]
    result = run(
        *("fit", task, "--config", recipe, *flags, *QUIET, "--data.batch_size", 4, "--data.num_workers", 0),
        *("--trainer.max_steps", 2, "--trainer.limit_val_batches", 1, "--trainer.limit_test_batches", 1),
        *("--trainer.log_every_n_steps", 1, "--trainer.default_root_dir", tmp_path / "runs"),
    )
    assert result.code == 0, result.err
    (folder,) = (tmp_path / "runs" / task).iterdir()
    losses = [row["train/loss_step"] for row in read_metrics(folder) if "train/loss_step" in row]
    assert len(losses) == 2
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("recipe", NEEDS_ROOT, ids=lambda path: path.stem)
def test_a_recipe_says_where_its_data_come_from(recipe: Path, run: Run) -> None:
    result = run("fit", recipe.stem.split("_")[0], "--config", recipe)
    assert result.code == 2
    assert "data.root is missing, expected --data.root FOLDER" in result.error
    assert "https://" in result.error
