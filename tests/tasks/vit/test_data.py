"""Digits and folders of images: classes, splits, bad folders, damaged files, augmentation."""

import hashlib
import warnings
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from multimodal.data import Augmentation, eval_transform, load_image
from tasks.vit.data import DIGITS_MEAN, DIGITS_STD, ImageData

SMALL = {"image_size": 8, "channels": 3, "num_workers": 0}


def fill(folder: Path, count: int, first: int = 0) -> None:
    """Images whose colours tell them apart."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(first, first + count):
        seed = int.from_bytes(hashlib.sha256(f"{folder}{index}".encode()).digest()[:4], "little")
        pixels = np.random.default_rng(seed).integers(0, 256, (12, 10, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")


def ready(stage: str = "fit", **options: Any) -> ImageData:
    data = ImageData(**{**SMALL, **options})
    data.setup(stage)
    return data


def files(data: ImageData, split: str) -> list[str]:
    return [image for image, _ in data.datasets[split].samples]


def epoch_of(data: ImageData, epoch: int = 0, split: str = "train") -> dict[int, Tensor]:
    """Each sample's image as it is in an epoch."""
    loader = getattr(data, f"{split}_dataloader")()
    loader.sampler.set_epoch(epoch)
    images = torch.cat([batch["image"] for batch in loader])
    return {key[1]: image for key, image in zip(loader.sampler, images, strict=True)}


# ------------------------------------------------------------------------------------------------------ digits


def test_the_digits() -> None:
    data = ImageData(image_size=8, channels=1)
    assert (data.num_classes, data.labels) == (10, [str(digit) for digit in range(10)])
    data.setup("fit")
    data.setup("test")
    sizes = {split: len(data.datasets[split]) for split in ("train", "val", "test")}
    assert sum(sizes.values()) == 1797
    assert sizes["test"] == 360
    assert 140 <= sizes["val"] <= 146
    counts = Counter(label for _, label in data.datasets["test"].samples)
    assert set(counts.values()) <= {35, 36, 37}
    batch = next(iter(data.test_dataloader()))
    assert batch["image"].shape == (64, 1, 8, 8)
    assert batch["image"].dtype == torch.float32
    assert batch["label"].dtype == torch.int64
    # The test set is part of the figures that are published: it is the same whatever the seeds.
    labels = [int(label) for _, label in data.datasets["test"].samples]
    assert labels[:12] == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3, 2, 6]
    target = load_digits().target
    assert labels == train_test_split(target, test_size=0.2, stratify=target, random_state=0)[1].tolist()


def test_the_splits_of_the_digits_do_not_overlap_and_the_test_set_is_fixed() -> None:
    def pixels(data: ImageData, split: str) -> list[bytes]:
        return [image.tobytes() for image, _ in data.datasets[split].samples]

    first, second = (ready(image_size=8, channels=1, seed=seed, split_seed=seed) for seed in (0, 1))
    first.setup("test")
    second.setup("test")
    assert pixels(first, "test") == pixels(second, "test")
    assert pixels(first, "val") != pixels(second, "val")
    every = [set(pixels(first, split)) for split in ("train", "val", "test")]
    assert sum(map(len, every)) == len(set.union(*every))


def test_the_digits_are_normalised_by_their_own_figures() -> None:
    data = ready(image_size=8, channels=1)
    images = torch.stack([data.datasets["val"][index]["image"] for index in range(140)])
    assert abs(float(images.mean())) < 0.03
    assert abs(float(images.std()) - 1) < 0.03
    assert (data.preprocess.mean, data.preprocess.std) == (DIGITS_MEAN, DIGITS_STD)
    colour = ready(image_size=(16, 24), channels=3)
    assert colour.datasets["train"][0]["image"].shape == (3, 16, 24)
    assert colour.preprocess.mean == DIGITS_MEAN * 3


# ----------------------------------------------------------------------------------------------------- folders


def test_train_val_and_test_folders(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("val", 2), ("test", 3)):
        for label in ("10", "2", "b"):
            fill(tmp_path / split / label, count)
    fill(tmp_path / "train" / "2" / "more" / "deep", 1, first=100)
    fill(tmp_path / ".hidden", 1)
    fill(tmp_path / "train" / ".hidden", 1)
    (tmp_path / "train" / "2" / "notes.txt").write_text("no image")
    data = ready(root=str(tmp_path))
    data.setup("test")
    assert data.labels == ["2", "10", "b"]
    assert {split: len(files(data, split)) for split in data.datasets} == {"train": 16, "val": 6, "test": 9}
    batch = next(iter(data.val_dataloader()))
    assert batch["label"].tolist() == [0, 0, 1, 1, 2, 2]
    expected = [eval_transform(data.preprocess)(load_image(path)) for path in files(data, "val")]
    assert torch.equal(batch["image"], torch.stack(expected))


def test_a_folder_of_classes_is_split_by_the_split_seed(tmp_path: Path) -> None:
    for label, count in (("cat", 20), ("dog", 40)):
        fill(tmp_path / label, count)

    def split(**options: Any) -> list[list[str]]:
        data = ready(root=str(tmp_path), **options)
        data.setup("test")
        return [files(data, name) for name in ("train", "val", "test")]

    parts = split(val_fraction=0.2, test_fraction=0.1)
    assert [len(part) for part in parts] == [42, 12, 6]
    assert len({path for part in parts for path in part}) == 60
    assert [sum("cat" in path for path in part) for part in parts] == [14, 4, 2]
    assert parts == split(val_fraction=0.2, test_fraction=0.1, seed=5)
    assert parts != split(val_fraction=0.2, test_fraction=0.1, split_seed=1)


def test_without_a_test_set_val_is_tested_on_and_says_so(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / "train" / label, 3)
        fill(tmp_path / "val" / label, 2)
    with pytest.warns(UserWarning, match="no images for testing, so val is tested on"):
        data = ready("test", root=str(tmp_path))
    assert len(files(data, "test")) == 4
    assert all("/val/" in path for path in files(data, "test"))


def test_train_alone_and_train_with_test(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / "train" / label, 10)
    data = ready(root=str(tmp_path))
    data.setup("test")
    assert {split: len(files(data, split)) for split in data.datasets} == {"train": 16, "val": 2, "test": 2}
    for label in ("a", "b"):
        fill(tmp_path / "test" / label, 3)
    data = ready(root=str(tmp_path))
    data.setup("test")
    assert {split: len(files(data, split)) for split in data.datasets} == {"train": 18, "val": 2, "test": 6}


def test_a_checkpoint_is_measured_without_a_train_folder(tmp_path: Path) -> None:
    fill(tmp_path / "val" / "b", 3)
    data = ready("validate", root=str(tmp_path), labels=["a", "b"])
    assert next(iter(data.val_dataloader()))["label"].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="no image is left for train"):
        ready("fit", root=str(tmp_path), labels=["a", "b"])


def test_train_may_be_a_class(tmp_path: Path) -> None:
    for label in ("bus", "car", "train"):
        fill(tmp_path / label, 3)
    assert ImageData(root=str(tmp_path), **SMALL).labels == ["bus", "car", "train"]


def test_a_class_of_one_image_is_trained_on(tmp_path: Path) -> None:
    fill(tmp_path / "rare", 1)
    fill(tmp_path / "common", 5)
    data = ready(root=str(tmp_path))
    data.setup("test")
    assert sum("rare" in path for path in files(data, "train")) == 1
    assert (len(files(data, "val")), len(files(data, "test"))) == (1, 1)


def test_one_image_of_each_class_leaves_none_for_validation(tmp_path: Path) -> None:
    for label in ("a", "b", "c"):
        fill(tmp_path / label, 1)
    with pytest.raises(ValueError, match="no image is left for val, expected at least 2 of some class"):
        ready(root=str(tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "no such folder, expected a folder with a folder of images for each class"),
        (lambda root: root.write_text(""), "a file, expected a folder"),
        (lambda root: root.mkdir(), "an empty folder, expected a folder of images for each class"),
        (lambda root: fill(root, 3), "3 images but no folder of a class, expected"),
        (lambda root: fill(root / "train", 3), "3 images but no folder of a class, expected"),
        (lambda root: (root / "cat").mkdir(parents=True), "cat: no image of class cat, expected at least one"),
        (lambda root: fill(root / "images", 3), r"1 class \(images\), expected at least 2"),
    ],
)
def test_folders_that_cannot_be_trained_on(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "photos")
    with pytest.raises(ValueError, match=rf"photos.*{message}") as caught:
        ImageData(root=str(tmp_path / "photos"), **SMALL)
    assert "\n" not in str(caught.value)


def test_classes_that_do_not_match(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / "train" / label, 3)
        fill(tmp_path / "val" / label, 3)
    (tmp_path / "val" / "empty").mkdir()
    assert ImageData(root=str(tmp_path), **SMALL).labels == ["a", "b"]
    for label in ("c10", "c2"):
        fill(tmp_path / "val" / label, 1)
    with pytest.raises(ValueError, match=r"val: has c2, c10, expected only classes of .*train"):
        ImageData(root=str(tmp_path), **SMALL)
    (tmp_path / "train" / "b" / "0.png").rename(tmp_path / "0.png")
    for path in (tmp_path / "train" / "b").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no image of class b, expected at least one"):
        ImageData(root=str(tmp_path), **SMALL)


def test_the_class_order_of_a_checkpoint(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / label, 4)
    data = ready(root=str(tmp_path), labels=["z", "b", "a"])
    assert (data.num_classes, data.labels) == (3, ["z", "b", "a"])
    assert next(iter(data.val_dataloader()))["label"].tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"class b is none of the checkpoint's 2 classes \(1 such\).*--init"):
        ImageData(root=str(tmp_path), labels=["a", "z"], **SMALL)


def test_preprocessing_follows_the_channels(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / label, 4)
    grey = ready(root=str(tmp_path), channels=1, image_size=(8, 16), crop_pct=0.9, interpolation="bilinear")
    assert grey.datasets["train"][0]["image"].shape == (1, 8, 16)
    assert grey.preprocess.to_dict() == {
        "size": [8, 16],
        "mean": [0.459],
        "std": [0.226],
        "interpolation": "bilinear",
        "crop_pct": 0.9,
        "crop_mode": "center",
    }
    given = ImageData(root=str(tmp_path), mean=[0.1, 0.2, 0.3], std=[1.0, 1.0, 1.0], **SMALL)
    assert given.preprocess.mean == (0.1, 0.2, 0.3)
    with pytest.raises(ValueError, match="mean has 1 values, expected one for each of 3 channels"):
        ImageData(root=str(tmp_path), mean=[0.5], **SMALL)
    with pytest.raises(ValueError, match="channels is 2, expected 1"):
        ImageData(root=str(tmp_path), image_size=8, channels=2)


def test_data_set_and_root_go_together(photos: str) -> None:
    with pytest.raises(ValueError, match=r"data\.root is .* and data\.dataset digits, which need none"):
        ImageData(dataset="digits", root=photos, **SMALL)
    with pytest.raises(ValueError, match=r"--data\.root FOLDER for data\.dataset folder; the data come from the shop"):
        ImageData(dataset="folder", source="the shop", **SMALL)
    assert ImageData(dataset="folder", root=photos, **SMALL).labels == ["a", "b"]


# ----------------------------------------------------------------------------------------------- damaged files


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Two classes of ten images, of which two are no images."""
    for label in ("a", "b"):
        fill(tmp_path / label, 10)
    (tmp_path / "a" / "0.png").write_bytes((tmp_path / "a" / "0.png").read_bytes()[:100])
    (tmp_path / "b" / "x.jpg").write_text("text")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_file_is_named(damaged: Path, workers: int) -> None:
    data = ready(root=str(damaged), num_workers=workers, batch_size=1)
    with pytest.raises(ValueError, match=r"^[^\n]*(a/0\.png: damaged|b/x\.jpg: no known image format)[^\n]*$"):
        list(chain(data.train_dataloader(), data.val_dataloader()))


def test_damaged_files_are_skipped_counted_and_named_on_request(damaged: Path) -> None:
    data = ImageData(root=str(damaged), skip_corrupt=True, batch_size=1, **SMALL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in ("fit", "test", "fit"):
            data.setup(stage)
    kept = [*files(data, "train"), *files(data, "val"), *files(data, "test")]
    assert len(kept) == 19
    assert not [path for path in kept if path.endswith(("a/0.png", "b/x.jpg"))]
    told = " ".join(str(warning.message) for warning in caught)
    assert told.count("a/0.png: damaged") == 1
    assert told.count("b/x.jpg: no known image format") == 1
    assert len(data.skipped) == 2
    whole = ready(root=str(damaged))
    # Nothing else moved: each split is what it was, without the damaged files.
    assert files(data, "train") == [path for path in files(whole, "train") if path in kept]
    assert sum(len(batch["label"]) for batch in data.train_dataloader()) == len(files(data, "train"))


def test_a_class_or_split_of_damaged_files_only(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "a", 3)
    fill(tmp_path / "val" / "a", 3)
    (tmp_path / "train" / "b").mkdir()
    (tmp_path / "train" / "b" / "x.jpg").write_text("text")
    with (
        pytest.warns(UserWarning, match="skipped 1 of 4"),
        pytest.raises(ValueError, match="no image of class b can be"),
    ):
        ready(root=str(tmp_path), skip_corrupt=True)
    fill(tmp_path / "train" / "b", 1)
    for path in (tmp_path / "val" / "a").iterdir():
        path.write_text("text")
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(ValueError, match="no val image can be read"):
        ready(root=str(tmp_path), skip_corrupt=True)


# ------------------------------------------------------------------------------------------------ augmentation


@pytest.fixture
def photos(tmp_path: Path) -> str:
    for label in ("a", "b"):
        fill(tmp_path / label, 8)
    return str(tmp_path)


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[index], other[index]) for index in one)


def test_augmentation_depends_on_seed_epoch_and_index_alone(photos: str) -> None:
    first = ready(root=photos, seed=1, batch_size=3)
    images = epoch_of(first)
    assert same(images, epoch_of(ready(root=photos, seed=1, batch_size=5, num_workers=2)))
    torch.rand(7)
    assert same(images, epoch_of(first))
    assert not any(torch.equal(images[index], image) for index, image in epoch_of(first, epoch=1).items())
    assert not same(images, epoch_of(ready(root=photos, seed=2)))


def test_the_repeats_of_an_image_differ(photos: str) -> None:
    data = ready(root=photos, repeated_augmentation=2, batch_size=12)
    (batch,) = data.train_dataloader()
    keys = list(data.train_dataloader().sampler)
    assert [key[2] for key in keys] == [0, 1] * 6
    images = batch["image"]
    assert all(not torch.equal(images[at], images[at + 1]) for at in range(0, 12, 2))
    assert all(batch["label"][at] == batch["label"][at + 1] for at in range(0, 12, 2))
    assert len(list(data.val_dataloader().sampler)) == len(files(data, "val")) == 2


def test_persistent_workers_are_told_the_epoch(photos: str) -> None:
    data = ready(root=photos, num_workers=2, batch_size=4)
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append(torch.cat([batch["image"] for batch in loader]))
    assert torch.equal(epochs[0], torch.stack(list(epoch_of(ready(root=photos), 0).values())))
    assert torch.equal(epochs[1], torch.stack(list(epoch_of(ready(root=photos), 1).values())))


def test_evaluation_is_not_augmented(photos: str) -> None:
    data = ready(root=photos)
    assert same(epoch_of(data, 0, "val"), epoch_of(data, 5, "val"))


def test_what_is_not_said_about_augmentation_suits_the_data(photos: str) -> None:
    assert ImageData(root=photos, **SMALL).augmentation.horizontal_flip == 0.5
    assert not ImageData(image_size=8, channels=1).augmentation.horizontal_flip
    data = ImageData(root=photos, augment=Augmentation(horizontal_flip=0.0), **SMALL)
    assert data.augmentation == Augmentation(crop_scale=(0.25, 1.0), horizontal_flip=0.0)


def test_a_dataset_takes_plain_indices_too(photos: str) -> None:
    dataset = ready(root=photos).datasets["train"]
    assert torch.equal(dataset[3]["image"], dataset[0, 3]["image"])


def test_an_image_that_cannot_be_resized_is_named(tmp_path: Path) -> None:
    for label in ("a", "b"):
        fill(tmp_path / label, 3)
    Image.new("L", (1, 30_000)).save(tmp_path / "a" / "narrow.png")
    data = ready(root=str(tmp_path), image_size=224, augment=Augmentation(crop_scale=(1.0, 1.0)))
    with pytest.raises(ValueError, match=r"narrow\.png: an image 30000 high and 1 wide is too narrow"):
        list(chain(data.train_dataloader(), data.val_dataloader()))


# --------------------------------------------------------------------------------------------------- real data


def test_photographs_of_clothing(shared: Path) -> None:
    data = ready(root=str(shared / "data" / "clothing80"), image_size=64, channels=3, batch_size=32)
    assert data.num_classes == 10
    assert len(files(data, "train")) + len(files(data, "val")) > 3000
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].shape == (32, 3, 64, 64)
    assert 0.5 < float(batch["image"].std()) < 1.6
    assert torch.isfinite(batch["image"]).all()
