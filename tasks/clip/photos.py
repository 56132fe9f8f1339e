"""Features of image files, kept so that each is decoded and embedded once, until it changes or the model does."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from multimodal.data import eval_transform, load_image
from tasks.clip.cache import Cache, default_folder
from tasks.clip.embed import Embedder, Space
from tasks.predict import device_of, predict_images

Stamp = list[int]
"""By which one sees that a file was changed."""


class Photo(NamedTuple):
    """An image file that was read: what the model sees of it, or what is kept of that."""

    stamp: Stamp
    pixels: Tensor | None
    features: Tensor | None


class Row(NamedTuple):
    """What is kept of an image file."""

    stamp: Stamp
    features: Tensor


class Photos:
    """The features of image files by a model. What is kept lies in one file for each folder of images."""

    def __init__(self, embedder: Embedder, space: Space = "joint") -> None:
        self.embedder = embedder
        self.space = space
        self._transform = eval_transform(embedder.preprocess)
        self._kept: dict[str, dict[str, Row]] = {}
        self._fresh: dict[str, dict[str, Row]] = {}

    @classmethod
    def load(cls, args: argparse.Namespace, space: Space = "joint") -> Self:
        """By the flags of a verb; ValueError where the checkpoint or the device is of no use."""
        cache = Cache(default_folder() if args.cache is None else Path(args.cache))
        return cls(Embedder.load(args.checkpoint, device_of(args.device), cache), space)

    def read(self, path: str) -> Photo:
        """ValueError where the file is not a whole image of sane size."""
        folder, name = _place(path)
        stamp = _stamp(path)
        if folder not in self._kept:
            self._kept[folder] = self._rows(folder)
        row = self._kept[folder].get(name)
        if row is not None and row.stamp == stamp:
            return Photo(row.stamp, None, row.features)
        return Photo(stamp or [], self._transform(load_image(path, self.embedder.preprocess.channels)), None)

    def features(self, photos: Mapping[str, Photo]) -> Tensor:
        """Features float32 [n, E] of what was read, by path and in that order."""
        new = {path: photo.pixels for path, photo in photos.items() if photo.pixels is not None}
        found = {path: photo.features for path, photo in photos.items() if photo.features is not None}
        if new:
            embedded = self.embedder.images(torch.stack(list(new.values())), self.space)
            for path, features in zip(new, embedded, strict=True):
                found[path] = features
                folder, name = _place(path)
                self._fresh.setdefault(folder, {})[name] = Row(photos[path].stamp, features)
        return torch.stack([found[path] for path in photos])

    def of(self, paths: Sequence[str], batch_size: int) -> tuple[int, dict[str, Tensor]]:
        """Features of all images that can be read, the others being named; the exit code, 1 where there are others."""
        found: dict[str, Tensor] = {}

        def embed(read: dict[str, Photo]) -> Iterator[str]:
            found.update(zip(read, self.features(read), strict=True))
            return iter(())

        with self:
            code = predict_images(paths, batch_size, self.read, embed)
        return code, found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Keep what was embedded, also when the command is stopped."""
        cache = self.embedder.cache
        for folder, fresh in self._fresh.items():
            with cache.lock():
                rows = self._rows(folder) | fresh
                rows = {name: row for name, row in rows.items() if _stamp(os.path.join(folder, name)) == row.stamp}
                if rows:
                    table = {name: row.stamp for name, row in rows.items()}
                    cache.write(torch.stack([row.features for row in rows.values()]), table, *self._key(folder))
        self._fresh = {}

    def _rows(self, folder: str) -> dict[str, Row]:
        kept = self.embedder.cache.read(*self._key(folder))
        if kept is None:
            return {}
        return {
            name: Row(stamp, features)
            for (name, stamp), features in zip(kept.table.items(), kept.embeddings, strict=True)
        }

    def _key(self, folder: str) -> tuple[str, ...]:
        return "photos", self.space, self.embedder.fingerprint, folder


def add_cache_argument(parser: argparse.ArgumentParser) -> None:
    """--cache; the rest is `tasks.predict.add_image_arguments`."""
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="where the features of images and labels are kept for each model (default: ~/.cache/multimodal/clip)",
    )


def _place(path: str) -> tuple[str, str]:
    folder, name = os.path.split(path)
    return os.path.realpath(folder or "."), name


def _stamp(path: str) -> Stamp | None:
    """None where there is no such file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    # The third changes also where someone puts back the second.
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
