"""Images with one label each: the embedded handwritten digits, or a folder of folders."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning.utilities import rank_zero_warn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from multimodal.data import Augmentation, ImagePreprocess, eval_transform, load_image, seeded, train_transform
from multimodal.data.image import CropMode, Interpolation, Transform
from tasks.data import Key, TaskData, stratified_split
from tasks.vit.folder import class_names, scan

Samples = Sequence[tuple[str | Image.Image, str]]
"""Image, as a file or decoded, and the name of its class."""

# Grey values of the 1,797 digits, and of photographs (ImageNet; grey by the weights of its three channels).
DIGITS_MEAN, DIGITS_STD = (0.305,), (0.376,)
PHOTO_MEAN = {1: (0.459,), 3: (0.485, 0.456, 0.406)}
PHOTO_STD = {1: (0.226,), 3: (0.229, 0.224, 0.225)}

NO_AUGMENTATION = Augmentation()
# A mirrored digit is no digit.
DIGITS_AUGMENTATION = Augmentation(rotation=10.0, translation=0.1, zoom=0.1)
PHOTO_AUGMENTATION = Augmentation(crop_scale=(0.25, 1.0), horizontal_flip=0.5)


class ImageDataset(Dataset[dict[str, Any]]):
    """Items `{"image": float32 [C, H, W], "label": int}`, by (epoch, index).

    The transform draws its random numbers from (seed, epoch, index) alone.
    """

    def __init__(self, samples: Samples, classes: list[str], transform: Transform, *, channels: int, seed: int) -> None:
        self.samples = samples
        self.positions = {name: position for position, name in enumerate(classes)}
        self.transform = transform
        self.channels = channels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        # Trainer flags such as overfit_batches bring a sampler of their own, which knows no epoch.
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, label = self.samples[index]
        return {"image": self._pixels(image, epoch, index), "label": self.positions[label]}

    def _pixels(self, image: str | Image.Image, epoch: int, index: int) -> Tensor:
        mode = "L" if self.channels == 1 else "RGB"
        decoded = load_image(image, self.channels) if isinstance(image, str) else image.convert(mode)
        with seeded(self.seed, epoch, index):
            try:
                return self.transform(decoded)
            except ValueError as error:
                raise ValueError(f"{image}: {error}") from None


class ImageData(TaskData):
    """Images by class. Batches are `{"image": float32 [B, C, H, W], "label": int64 [B]}`.

    The classes of a folder come in natural order (2 before 10). A folder with train and val but without test is tested
    on val; one without any of these is split by split_seed.

    Args:
        root: Folder with train, val and perhaps test, each with a folder a class, or with just the folders of the
            classes; None = the 1,797 handwritten digits of scikit-learn, a fifth of them for testing.
        image_size: Side, or height and width, of what the network sees, in pixels.
        channels: 1 for grey, 3 for colour.
        mean: Subtracted from each channel, where white is 1; None = that of the digits, or of photographs.
        std: What each channel is then divided by; None = that of the digits, or of photographs.
        interpolation: How images are resized: nearest, bilinear, bicubic or lanczos.
        crop_pct: Share of the resized image's side that evaluation cuts out of its centre.
        crop_mode: center keeps the aspect ratio and loses edges, squash does not keep it.
        skip_corrupt: Decode every image before the start, and leave out and report those that cannot be read.
        labels: Class names in the order of a checkpoint's outputs; None = those of the data.
        augment: Random changes in training; what is left None suits the digits, or photographs.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: a folder without images, without classes, or with classes that `labels` or train do not have.
    """

    def __init__(
        self,
        *,
        root: str | None = None,
        image_size: int | tuple[int, int],
        channels: int,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: Interpolation = "bicubic",
        crop_pct: float = 1.0,
        crop_mode: CropMode = "center",
        skip_corrupt: bool = False,
        labels: list[str] | None = None,
        augment: Augmentation = NO_AUGMENTATION,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels}, expected 1 (grey) or 3 (RGB)")
        for name, values in (("mean", mean), ("std", std)):
            if values is not None and len(values) != channels:
                raise ValueError(
                    f"data.{name} has {len(values)} values, expected one for each of {channels} channels, "
                    "or null for that of the digits or of photographs"
                )
        self.root = root
        self.in_memory = root is None
        self.skip_corrupt = skip_corrupt
        self.skipped: list[str] = []
        self.augmentation = augment.over(DIGITS_AUGMENTATION if root is None else PHOTO_AUGMENTATION)
        default_mean = DIGITS_MEAN * channels if root is None else PHOTO_MEAN[channels]
        default_std = DIGITS_STD * channels if root is None else PHOTO_STD[channels]
        self.preprocess = ImagePreprocess(
            size=(image_size, image_size) if isinstance(image_size, int) else image_size,
            mean=default_mean if mean is None else tuple(mean),
            std=default_std if std is None else tuple(std),
            interpolation=interpolation,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
        )
        self._found: dict[str, Any] = digits() if root is None else scan(root)
        self.labels = self._class_order(labels)

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def _class_order(self, labels: list[str] | None) -> list[str]:
        present = class_names(self._found.get("train") or [*chain(*self._found.values())])
        where = f"data root {self.root}" if self.root else "the digits"
        if labels is None:
            if len(present) < 2:
                raise ValueError(f"{where}: 1 class ({present[0]}), expected at least 2")
            return present
        if unknown := [name for name in present if name not in set(labels)]:
            raise ValueError(
                f"{where}: class {unknown[0]} is none of the checkpoint's {len(labels)} classes ({len(unknown)} such), "
                "expected its classes; to train new ones start from it with --init"
            )
        return list(labels)

    def setup(self, stage: str) -> None:
        wanted = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ())
        for split in wanted:
            if split not in self.datasets:
                self.datasets[split] = self._dataset(split)

    def _dataset(self, split: str) -> ImageDataset:
        samples = self._splits[split]
        if not samples:
            raise ValueError(
                f"data root {self.root}: no image is left for {split}, expected at least 2 of some class, "
                "or folders train and val"
            )
        if split == "test" and samples is self._splits["val"]:
            rank_zero_warn(f"data root {self.root}: no images for testing, so val is tested on")
        if self.skip_corrupt and self.root is not None:
            samples = self._readable(split, samples)
        if split == "train":
            transform = train_transform(self.preprocess, self.augmentation)
        else:
            transform = eval_transform(self.preprocess)
        return ImageDataset(samples, self.labels, transform, channels=self.preprocess.channels, seed=self.seed)

    @cached_property
    def _splits(self) -> dict[str, Samples]:
        """The samples of train, val and test, with the splits made that did not come with the data."""
        found = self._found
        missing = [] if "val" in found else ["val"]
        if "test" not in found and "val" not in found:
            missing.append("test")
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        train = found.get("train", [])
        parts = stratified_split([label for _, label in train], [shares[name] for name in missing], self.split_seed)
        chosen = [[train[index] for index in part] for part in parts]
        splits: dict[str, Samples] = {**found, **dict(zip(["train", *missing], chosen, strict=True))}
        if not splits.get("test"):
            splits["test"] = splits["val"]
        return splits

    def _readable(self, split: str, samples: Samples) -> Samples:
        """Without the images that cannot be decoded, which are counted and named once. Every process does the same."""
        with ThreadPoolExecutor() as pool:
            errors = list(
                tqdm(
                    pool.map(lambda sample: _error_of(sample[0], self.preprocess.channels), samples),
                    total=len(samples),
                    desc=f"checking {split} images",
                    disable=None,
                )
            )
        bad = [error for error in errors if error]
        good = [sample for sample, error in zip(samples, errors, strict=True) if not error]
        if bad:
            self.skipped += bad
            rank_zero_warn(f"skipped {len(bad)} of {len(samples)} {split} images: {'; '.join(bad)}")
        if split == "train" and (empty := {name for _, name in samples} - {name for _, name in good}):
            raise ValueError(
                f"data root {self.root}: no image of class {min(empty)} can be read, expected at least one"
            )
        if not good:
            raise ValueError(f"data root {self.root}: no {split} image can be read, expected at least one")
        return good


def _error_of(image: Any, channels: int) -> str | None:
    try:
        load_image(image, channels)
    except ValueError as error:
        return str(error)
    return None


def digits() -> dict[str, Samples]:
    """Scikit-learn's handwritten digits, 8 × 8 pixels of 17 grey levels; the test set is the same in every run."""
    data = load_digits()
    images = [Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)) for pixels in data.images]
    samples = [(image, str(label)) for image, label in zip(images, data.target, strict=True)]
    train, test = train_test_split(samples, test_size=0.2, stratify=data.target, random_state=0)
    return {"train": train, "test": test}
