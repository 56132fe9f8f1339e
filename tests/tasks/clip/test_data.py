"""What a batch holds, and the scenes, tables and folders that it is made of."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data import CLIPTokenizer
from multimodal.data.scenes import COLORS, PAIRS, SHAPES
from tasks.clip.data import CaptionData
from tasks.clip.samples import LABELS, TEST_PAIRS, TRAIN_PAIRS, UNSEEN, VAL_PAIRS, Scenes, text_id
from tasks.clip.table import TableOptions

SMALL: dict[str, Any] = {"image_size": 32, "context_length": 77, "num_workers": 0, "batch_size": 4}


def ready(stage: str = "fit", **options: Any) -> CaptionData:
    data = CaptionData(**{**SMALL, **options})
    data.setup(stage)
    return data


def texts(data: CaptionData, split: str) -> set[str]:
    samples = data.datasets[split].samples
    return {caption for index in range(len(samples)) for caption in samples[index].captions}


def draw(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = int.from_bytes(hashlib.sha256(path.name.encode()).digest()[:4], "little")
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def emoji(tmp_path: Path) -> Path:
    """60 concepts, drawn in two styles, with captions in two languages."""
    rows = ["file\tcaption\tcaption_de"]
    for style in ("one", "two"):
        for number in range(60):
            draw(tmp_path / "emoji" / style / f"{number}.png")
            rows.append(f"{style}/{number}.png\tthing {number}\tDing {number}")
    (tmp_path / "emoji" / "captions.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path / "emoji"


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    for name in ("big_cat", "dog", "eel"):
        for number in range(5):
            draw(tmp_path / "animals" / name / f"{name}{number}.png")
    return tmp_path / "animals"


# Scenes


def test_unseen_pairs_are_never_in_training_and_spread_evenly() -> None:
    assert (len(UNSEEN), len(VAL_PAIRS), len(TEST_PAIRS), len(TRAIN_PAIRS)) == (16, 4, 12, 48)
    assert not set(UNSEEN) & set(TRAIN_PAIRS)
    assert not set(VAL_PAIRS) & set(TEST_PAIRS)
    assert {sum(pair[0] == color for pair in UNSEEN) for color in COLORS} == {2}
    assert {sum(pair[1] == shape for pair in UNSEEN) for shape in SHAPES} == {2}
    captions = texts(ready(num_scenes=300), "train")
    for color, shape in UNSEEN:
        assert not any(f"{color} {shape}" in caption for caption in captions), (color, shape)
    for color, shape in TRAIN_PAIRS:
        assert any(f"{color} {shape}" in caption for caption in captions), (color, shape)


def test_scenes_are_measured_on_single_objects_of_unseen_pairs_among_all_labels() -> None:
    data = ready("test")
    samples = data.datasets["test"].samples
    assert len(samples) == 50 * 12
    expected = {label for label, pair in zip(LABELS, PAIRS, strict=True) if pair in TEST_PAIRS}
    assert {samples[index].captions[0] for index in range(24)} == expected
    first, second = list(data.test_dataloader())[:2]
    assert len(first["tokens"]) == 4 + 64
    assert first["caption_of"].tolist() == [0] + [-1] * 64 + [1, 2, 3]
    assert first["caption_id"][1:65].tolist() == [text_id(label) for label in LABELS]
    assert second["caption_of"].tolist() == second["image_id"].tolist() == [4, 5, 6, 7]
    assert set(second["caption_id"].tolist()) < set(first["caption_id"][1:65].tolist())


def test_scenes_to_train_on_have_one_to_four_objects() -> None:
    numbers = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4}
    samples = Scenes("train", 60)
    captions = [samples[index].captions[0] for index in range(60)]
    assert {sum(numbers.get(word, 0) for word in caption.split()) for caption in captions} == {1, 2, 3, 4}
    assert samples[3] is samples[3], "drawn once"


# Batches


def test_a_batch_is_cut_at_its_longest_caption(emoji: Path) -> None:
    data = ready(root=str(emoji))
    batch = next(iter(data.train_dataloader()))
    assert {name: (value.dtype, len(value)) for name, value in batch.items()} == {
        "image": (torch.float32, 4),
        "image_id": (torch.int64, 4),
        "tokens": (torch.int64, 4),
        "caption_id": (torch.int64, 4),
        "caption_of": (torch.int64, 4),
    }
    assert batch["image"].shape == (4, 3, 32, 32)
    assert batch["tokens"].shape[1] < 10
    assert (batch["tokens"] == CLIPTokenizer.end_token).sum(dim=1).tolist() == [1] * 4
    short = next(iter(ready(root=str(emoji), context_length=3).train_dataloader()))
    assert short["tokens"][:, -1].tolist() == [CLIPTokenizer.end_token] * 4


def test_one_caption_is_drawn_in_training_and_all_are_measured(emoji: Path) -> None:
    data = ready(root=str(emoji), table=TableOptions(caption_columns=("caption", "caption_de")))
    dataset = data.datasets["train"]
    drawn = [dataset[epoch, 7]["captions"] for epoch in range(20)]
    assert {len(captions) for captions in drawn} == {1}
    assert {captions[0].split()[0] for captions in drawn} == {"thing", "Ding"}
    assert [dataset[epoch, 7]["captions"] for epoch in range(20)] == drawn
    batch = next(iter(data.val_dataloader()))
    assert len(batch["tokens"]) == 2 * len(batch["image"])
    assert batch["caption_of"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# Tables


def test_captions_that_are_held_out_are_so_in_every_style(emoji: Path) -> None:
    parts = {"val_fraction": 0.2, "test_fraction": 0.2}
    every = ready(root=str(emoji), **parts)
    every.setup("test")
    split = {name: texts(every, name) for name in ("train", "val", "test")}
    assert not split["train"] & (split["val"] | split["test"])
    assert len(every.datasets["train"]) == 2 * len(split["train"])
    one = ready(root=str(emoji), **parts, table=TableOptions(files="one/*"))
    assert texts(one, "train") == split["train"]
    other = ready("test", root=str(emoji), **parts, table=TableOptions(files="two/*"))
    assert texts(other, "test") == split["test"]
    seen = ready("test", root=str(emoji), **parts, table=TableOptions(files="two/*", test_on="seen"))
    assert texts(seen, "test") == split["train"]
    assert len(seen.datasets["test"].samples) == len(split["train"])
    assert not seen.datasets["test"].training


def test_without_a_test_split_val_is_tested_on(emoji: Path) -> None:
    data = ready(root=str(emoji), test_fraction=0.0)
    with pytest.warns(UserWarning, match="no images for testing, so val is tested on"):
        data.setup("test")
    assert texts(data, "test") == texts(data, "val")


# Classes


def test_captions_of_a_class_mean_the_same(animals: Path) -> None:
    data = ready(root=str(animals), templates=("a photo of a {}.", "{}!"))
    dataset = data.datasets["train"]
    drawn = {dataset[epoch, 0]["captions"][0] for epoch in range(20)}
    assert drawn == {"a photo of a big cat.", "big cat!"}
    assert {dataset[epoch, 0]["caption_id"] for epoch in range(20)} == {(text_id("big_cat"),)}
    item = data.datasets["val"][0]
    assert item["captions"] == (
        "a photo of a big cat.",
        "a photo of a big cat.",
        "a photo of a dog.",
        "a photo of a eel.",
    )
    assert item["caption_of"] == [0, -1, -1, -1]


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ((), "data.templates is empty"),
        (("a cat",), "'a cat' has 0 places {}, expected one"),
        (("{} {}",), "'{} {}' has 2 places {}, expected one"),
    ],
)
def test_templates_are_checked(templates: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaptionData(**SMALL, templates=templates)


# Which data


def test_what_lies_in_root_is_seen(emoji: Path, animals: Path, tmp_path: Path) -> None:
    assert CaptionData(**SMALL).name == "scenes"
    assert CaptionData(**SMALL, root=str(emoji)).name == "captions"
    assert CaptionData(**SMALL, root=str(animals)).name == "folder"
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "0.tar").touch()
    assert CaptionData(**SMALL, root=str(tmp_path / "s")).name == "shards"


def test_what_cannot_be_is_refused(emoji: Path, animals: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"dataset": "captions"}, "data.root is missing, expected --data.root FOLDER for data.dataset captions"),
        ({"dataset": "shards", "source": "https://x"}, "the data come from https://x"),
        ({"dataset": "scenes", "root": str(emoji)}, "data.dataset scenes, which need none: expected one of them"),
        ({"root": str(tmp_path / "none")}, "none: no such folder, expected a folder of images with captions"),
        ({"num_scenes": 0}, "num_scenes is 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            CaptionData(**SMALL, **options)
    with pytest.raises(ValueError, match=r"no table of captions, expected a \.tsv or \.csv file in it"):
        ready(root=str(animals), dataset="captions")
    (tmp_path / "few").mkdir()
    draw(tmp_path / "few" / "a.png")
    (tmp_path / "few" / "c.tsv").write_text("file\tcaption\na.png\tx\n")
    with pytest.raises(ValueError, match=r"no image is left for (train|val), expected more images, or that split"):
        ready(root=str(tmp_path / "few"))


def test_data_are_told_apart_by_their_fingerprint(emoji: Path, animals: Path) -> None:
    found = {
        ready(num_scenes=10).datasets["train"].fingerprint,
        ready(num_scenes=20).datasets["train"].fingerprint,
        ready(root=str(emoji)).datasets["train"].fingerprint,
        ready(root=str(emoji), table=TableOptions(files="one/*")).datasets["train"].fingerprint,
        ready(root=str(animals)).datasets["train"].fingerprint,
    }
    assert len(found) == 5
