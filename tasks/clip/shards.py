"""WebDataset shards: tar files whose members of one name are an image and its caption.

Nothing is unpacked. Each shard's headers are read once; then any sample can be read where it lies, so that an epoch has
an exact length, in any order, with any number of workers, and can be begun in the middle.

Legend: N samples, S shards.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pytorch_lightning.utilities import rank_zero_warn

from multimodal.data import load_image
from multimodal.data.image import IMAGE_EXTENSIONS
from tasks.clip.samples import Sample, digest_of, text_id

SPLITS = ("train", "val", "test")
WINDOW = 8
"""Shards among whose samples a random order mixes: so many are read at a time."""
LONGEST = 1 << 20
"""Bytes that a caption may have."""
_TEXT, _JSON = ".txt", ".json"
_COLUMNS = 6
"""Shard, where its image begins and how many bytes it has, the same of its caption, and whether that is JSON."""
_TOLD = 5
_BLOCK = 512


class Member(NamedTuple):
    """A file in a shard."""

    key: str
    """Its path up to the first dot: what belongs together has the same."""
    suffix: str
    """The rest, from the dot on, in lower case."""
    start: int
    size: int


class Shards:
    """Samples of shards.

    Args:
        files: the shards.
        rows: int64 [N, 6], the samples; see `index`.
    """

    candidates: Sequence[tuple[str, int]] = ()

    def __init__(self, files: Sequence[str], rows: NDArray[np.int64]) -> None:
        self.files = files
        self.rows = rows
        sizes = [(os.path.basename(file), os.path.getsize(file)) for file in files]
        self.fingerprint = digest_of(*sizes, digest_of(rows.tobytes()))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        shard, *places, is_json = self.rows[index].tolist()
        file = self.files[shard]
        with open(file, "rb") as tar:
            image, caption = (_read(tar, *place) for place in (places[:2], places[2:]))
        captions = captions_of(caption, _JSON if is_json else _TEXT)
        try:
            return Sample(load_image(image), captions, [text_id(text) for text in captions])
        except ValueError as error:
            raise ValueError(f"{file}: the image at byte {places[0]}: {error}") from None

    def subset(self, positions: Sequence[int]) -> "Shards":
        """Those samples alone."""
        return Shards(self.files, self.rows[np.asarray(positions, np.int64)])

    def shuffle(self, rng: np.random.Generator, epoch: int) -> NDArray[np.int64]:
        """Shards in random order, and the samples of each `WINDOW` of them mixed: int64 [N]."""
        order = np.argsort(self.rows[:, 0], kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(self.rows[order, 0])) + 1)
        dealt = rng.permutation(len(parts))
        windows = [dealt[at : at + WINDOW] for at in range(0, len(dealt), WINDOW)]
        mixed = [rng.permutation(np.concatenate([parts[shard] for shard in window])) for window in windows]
        return np.concatenate(mixed)


def _read(tar: Any, start: int, size: int) -> bytes:
    tar.seek(start)
    found: bytes = tar.read(size)
    if len(found) != size:
        raise ValueError(f"{tar.name}: {len(found)} bytes at byte {start}, expected {size}: it has changed")
    return found


# -------------------------------------------------------------------------------------------------------- reading


def has_shards(root: Path) -> bool:
    """Whether shards lie in a folder, or in those of its splits."""
    return any(_tars(folder) for folder in (root, *(root / split for split in SPLITS)))


def read_shards(root: Path) -> dict[str, Shards]:
    """The shards of root/train, root/val and root/test; those of root alone are "train".

    What cannot be used is left out and named: members outside of the shard's folder or that are no files, samples
    without image or caption, and whatever lies behind the place where a shard is damaged or cut.

    Raises:
        ValueError: no shard, or none with a sample.
    """
    splits = {split: found for split in SPLITS if (found := _tars(root / split))} or {"train": _tars(root)}
    if not splits["train" if "train" in splits else next(iter(splits))]:
        raise ValueError(f"data root {root}: no shard, expected .tar files in it or in its folders train, val and test")
    return {split: _indexed(files) for split, files in splits.items()}


def _tars(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.tar") if path.is_file() and not path.name.startswith("."))


def _indexed(files: list[Path]) -> Shards:
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(index, files))
    problems = [f"{path}: {problem}" for path, (_, several) in zip(files, found, strict=True) for problem in several]
    if problems:
        more = f" and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        rank_zero_warn(f"left out of {len(files)} shards: {'; '.join(problems[:_TOLD])}{more}")
    rows = [np.insert(rows, 0, number, axis=1) for number, (rows, _) in enumerate(found)]
    whole = np.concatenate(rows)
    if not len(whole):
        raise ValueError(f"{files[0].parent}: no sample in its {len(files)} shards, expected images with captions")
    return Shards([str(path) for path in files], whole)


def index(path: Path) -> tuple[NDArray[np.int64], list[str]]:
    """Where a shard's samples lie, int64 [N, 5] (without the shard's number), and what was left out."""
    problems: list[str] = []
    rows = []
    with path.open("rb") as tar:
        for key, members in groupby(_members(path, problems), key=lambda member: member.key):
            row = _row(tar, key, {member.suffix: member for member in members}, problems)
            if row is not None:
                rows.append(row)
    return np.array(rows, np.int64).reshape(-1, _COLUMNS - 1), problems


def _members(path: Path, problems: list[str]) -> Iterator[Member]:
    """The files of a shard whose names stay in their folder, up to where it is damaged or ends."""
    size = path.stat().st_size
    name = ""
    try:
        with tarfile.open(path, "r:") as tar:
            for entry in tar:
                name = entry.name
                if entry.isdir():
                    continue
                if name.startswith("/") or ".." in name.split("/"):
                    problems.append(f"{name} leads out of its folder")
                elif not entry.isreg() or entry.issparse():
                    problems.append(f"{name} is no plain file")
                elif entry.offset_data + entry.size > size:
                    problems.append(f"cut short in {name}")
                    return
                else:
                    folder, _, base = name.rpartition("/")
                    stem, dot, suffix = base.partition(".")
                    yield Member(f"{folder}/{stem}", f"{dot}{suffix.lower()}", entry.offset_data, entry.size)
            if size < tar.offset + _BLOCK:
                problems.append(f"cut short behind {name}")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        where = f" behind {name}" if name else ""
        problems.append(f"damaged{where} ({error})")


def _row(tar: Any, key: str, members: dict[str, Member], problems: list[str]) -> tuple[int, ...] | None:
    """Of one sample; None where something is missing, which is told."""
    image = next((member for suffix, member in members.items() if suffix in IMAGE_EXTENSIONS), None)
    caption = members.get(_TEXT) or members.get(_JSON)
    name = key.removeprefix("/")
    if image is None or caption is None:
        problems.append(f"{name} has no {'image' if image is None else 'caption'}")
        return None
    if caption.size > LONGEST:
        problems.append(f"the caption of {name} has {caption.size} bytes, expected at most {LONGEST}")
        return None
    try:
        captions_of(_read(tar, caption.start, caption.size), caption.suffix)
    except ValueError as error:
        problems.append(f"the caption of {name} {error}")
        return None
    return image.start, image.size, caption.start, caption.size, int(caption.suffix == _JSON)


def captions_of(content: bytes, suffix: str) -> list[str]:
    """The captions in a text file, which is one, or in a JSON file, as `caption` or `captions`, each once.

    Raises:
        ValueError: what is wrong with it, behind its name.
    """
    try:
        found: Any = content.decode()
        if suffix == _JSON:
            found = json.loads(found)
            found = found.get("captions", found.get("caption")) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        raise ValueError(f"is no {'JSON' if suffix == _JSON else 'text in UTF-8'}") from None
    texts = found if isinstance(found, list) else [found]
    captions = list(dict.fromkeys(text.strip() for text in texts if isinstance(text, str) and text.strip()))
    if not captions:
        raise ValueError("is empty")
    return captions
