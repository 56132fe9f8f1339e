"""Images with one label each: the embedded handwritten digits, CIFAR, or a folder of folders."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
from PIL import Image
from pytorch_lightning.utilities import rank_zero_warn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from multimodal.data import Augmentation, ImagePreprocess, eval_transform, load_image, seeded, train_transform
from multimodal.data.folder import class_names, scan
from multimodal.data.image import CropMode, Interpolation, Transform
from tasks.data import Key, TaskData
from tasks.vit.cifar import cifar

Samples = Sequence[tuple[str | Image.Image, str]]
"""Image, as a file or decoded, and the name of its class."""

DatasetName = Literal["digits", "folder", "cifar10", "cifar100"]

# Grey values of the 1,797 digits; of photographs (ImageNet; grey by the weights of its three channels); of CIFAR.
DIGITS_MEAN, DIGITS_STD = (0.305,), (0.376,)
PHOTO_MEAN = {1: (0.459,), 3: (0.485, 0.456, 0.406)}
PHOTO_STD = {1: (0.226,), 3: (0.229, 0.224, 0.225)}
CIFAR_MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
CIFAR_STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}

NO_AUGMENTATION = Augmentation()
AUGMENTATION = {
    # A mirrored digit is no digit.
    "digits": Augmentation(rotation=10.0, translation=0.1, zoom=0.1),
    "folder": Augmentation(crop_scale=(0.25, 1.0), horizontal_flip=0.5),
    "cifar10": Augmentation(crop_padding=4, horizontal_flip=0.5),
    "cifar100": Augmentation(crop_padding=4, horizontal_flip=0.5),
}


class ImageDataset(Dataset[dict[str, Any]]):
    """Items `{"image": float32 [C, H, W], "label": int}`, by key or by index alone.

    The transform draws its random numbers from the seed and that key alone.
    """

    def __init__(self, samples: Samples, classes: list[str], transform: Transform, *, channels: int, seed: int) -> None:
        self.samples = samples
        self.positions = {name: position for position, name in enumerate(classes)}
        self.transform = transform
        self.channels = channels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the samples and their order, though not with the place of their folder."""
        digest = hashlib.blake2b(digest_size=16)
        for image, label in self.samples:
            digest.update(f"{os.path.basename(image) if isinstance(image, str) else ''}/{label}\n".encode())
        return digest.hexdigest()

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        # Trainer flags such as overfit_batches bring a sampler of their own, which knows no epoch.
        key = key if isinstance(key, tuple) else (0, key)
        image, label = self.samples[key[1]]
        return {"image": self._pixels(image, key), "label": self.positions[label]}

    def _pixels(self, image: str | Image.Image, key: Key) -> Tensor:
        mode = "L" if self.channels == 1 else "RGB"
        decoded = load_image(image, self.channels) if isinstance(image, str) else image.convert(mode)
        with seeded(self.seed, *key):
            try:
                return self.transform(decoded)
            except ValueError as error:
                raise ValueError(f"{image}: {error}") from None


class ImageData(TaskData):
    """Images by class. Batches are `{"image": float32 [B, C, H, W], "label": int64 [B]}`.

    The classes of a folder come in natural order (2 before 10). A folder with train and val but without test is tested
    on val; one without any of these is split by split_seed.

    Args:
        dataset: folder of images; digits, the 1,797 handwritten ones of scikit-learn, a fifth of them for testing;
            cifar10 or cifar100; None = folder where there is a root, else digits.
        root: Folder with train, val and perhaps test, each with a folder a class, or with just the folders of the
            classes; for CIFAR the folder in which its own lies, or into which it is downloaded.
        source: Where people get the data that belong into root; told where root is missing.
        image_size: Side, or height and width, of what the network sees, in pixels.
        channels: 1 for grey, 3 for colour.
        mean: Subtracted from each channel, where white is 1; None = that of the data set, or of photographs.
        std: What each channel is then divided by; None = that of the data set, or of photographs.
        interpolation: How images are resized: nearest, bilinear, bicubic or lanczos.
        crop_pct: Share of the resized image's side that evaluation cuts out of its centre.
        crop_mode: center keeps the aspect ratio and loses edges, squash does not keep it.
        skip_corrupt: Decode every image before the start, and leave out and report those that cannot be read.
        labels: Class names in the order of a checkpoint's outputs; None = those of the data.
        augment: Random changes in training; what is left None suits the data set.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: a folder without images, without classes, or with classes that `labels` or train do not have; no
            root where the data set needs one, or one where it takes none; CIFAR that cannot be downloaded.
    """

    def __init__(
        self,
        *,
        dataset: DatasetName | None = None,
        root: str | None = None,
        source: str | None = None,
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
                    "or null for that of the data set"
                )
        name = dataset or ("digits" if root is None else "folder")
        self._found: dict[str, Any] = _find(name, root, source)
        self.root = root
        self.in_memory = name == "digits"
        self.skip_corrupt = skip_corrupt
        self.skipped: list[str] = []
        self.augmentation = augment.over(AUGMENTATION[name])
        default_mean, default_std = _color_range(name, channels)
        self.preprocess = ImagePreprocess(
            size=(image_size, image_size) if isinstance(image_size, int) else image_size,
            mean=default_mean if mean is None else tuple(mean),
            std=default_std if std is None else tuple(std),
            interpolation=interpolation,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
        )
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
        if self.skip_corrupt and isinstance(samples[0][0], str):
            samples = self._readable(split, samples)
        if split == "train":
            transform = train_transform(self.preprocess, self.augmentation)
        else:
            transform = eval_transform(self.preprocess)
        return ImageDataset(samples, self.labels, transform, channels=self.preprocess.channels, seed=self.seed)

    @cached_property
    def _splits(self) -> dict[str, Samples]:
        """The samples of train, val and test, with the splits made that did not come with the data."""
        return self.complete(self._found, lambda sample: sample[1])

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


def _find(name: str, root: str | None, source: str | None) -> dict[str, Any]:
    """Samples by split."""
    if name == "digits":
        if root is not None:
            raise ValueError(f"data.root is {root} and data.dataset digits, which need none: expected one of them")
        return digits()
    if root is None:
        told = f"; the data come from {source}" if source else ""
        raise ValueError(f"data.root is missing, expected --data.root FOLDER for data.dataset {name}{told}")
    return scan(root) if name == "folder" else cifar(name, root)


def _color_range(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel."""
    if name == "digits":
        return DIGITS_MEAN * channels, DIGITS_STD * channels
    if name in CIFAR_MEAN and channels == 3:
        return CIFAR_MEAN[name], CIFAR_STD[name]
    return PHOTO_MEAN[channels], PHOTO_STD[channels]


def digits() -> dict[str, Samples]:
    """Scikit-learn's handwritten digits, 8 × 8 pixels of 17 grey levels; the test set is the same in every run."""
    data = load_digits()
    images = [Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8)) for pixels in data.images]
    samples = [(image, str(label)) for image, label in zip(images, data.target, strict=True)]
    train, test = train_test_split(samples, test_size=0.2, stratify=data.target, random_state=0)
    return {"train": train, "test": test}
