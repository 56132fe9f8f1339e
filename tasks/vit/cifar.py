"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), through torchvision."""

import http.client
from pathlib import Path

from filelock import FileLock
from PIL import Image
from pytorch_lightning.utilities import rank_zero_info
from torchvision.datasets import CIFAR10, CIFAR100

ARCHIVES: dict[str, type[CIFAR10]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}

Samples = list[tuple[Image.Image, str]]
"""Decoded image and class name."""


def cifar(name: str, root: str) -> dict[str, Samples]:
    """The 50,000 training and 10,000 test images below `root`, downloaded into it where they are not there.

    Torchvision compares each file with its published checksum before it is read.

    Raises:
        ValueError: neither there nor to be had.
    """
    archive = ARCHIVES[name]
    if Path(root).exists() and not Path(root).is_dir():
        raise ValueError(f"data root {root}: a file, expected a folder for {archive.base_folder}")
    if not _is_whole(archive, root):
        Path(root).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(root, f".{name}.lock")):  # other processes wait, and then find it
            if not _is_whole(archive, root):
                _download(archive, root)
    return {split: _samples(archive(root, train=split == "train")) for split in ("train", "test")}


def _is_whole(archive: type[CIFAR10], root: str) -> bool:
    try:
        archive(root, train=False)
    except RuntimeError:  # how torchvision tells of a file that is missing or has another checksum
        return False
    return True


def _download(archive: type[CIFAR10], root: str) -> None:
    wanted = f"data root {root}: no whole {archive.base_folder} in it"
    rank_zero_info(f"{wanted}: downloading {archive.url}")
    try:
        archive(root, download=True)
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        raise ValueError(f"{wanted}, and {archive.url} cannot be downloaded ({error}), expected either") from error


def _samples(images: CIFAR10) -> Samples:
    return [
        (Image.fromarray(pixels), images.classes[label])
        for pixels, label in zip(images.data, images.targets, strict=True)
    ]
