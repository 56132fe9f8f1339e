"""What annotation files say about images, whatever their format; boxes made clean, and turned with their image.

Boxes are x0, y0, x1, y1 in pixels. Legend: N boxes of an image, H height, W width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pytorch_lightning.utilities import rank_zero_warn

from multimodal.data.image import image_size, load_oriented

Size = tuple[int, int]
"""Height and width in pixels."""
Floats = NDArray[np.floating]

_NAMED = 3
"""How many of a kind a message names."""
_SLACK = 0.01
"""Pixels by which a box may reach outside without a word: sums of rounded decimals do."""


@dataclass(frozen=True)
class Record:
    """The annotations of one image.

    Args:
        file: where the image lies.
        image_id: of the file of annotations.
        size: what the annotations say about the image; None = nothing.
        boxes: float32 [N, 4], inside the image as the annotations see it: stored or upright.
        labels: int64 [N], index of the class.
        crowd: bool [N], True for a region of many objects, or one that is not to be counted.
        area: float32 [N], pixels.
    """

    file: str
    image_id: int
    size: Size | None
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float32]


@dataclass(frozen=True)
class Annotations:
    """All images of a data set, or of one of its splits.

    Args:
        source: the file or folder that says so, for messages.
        records: one an image, also those without boxes.
        labels: names of the classes.
        category_ids: the number that the files have for each class.
    """

    source: str
    records: list[Record]
    labels: list[str]
    category_ids: list[int]


@dataclass(frozen=True)
class Sample:
    """An image, upright, and what is to be found in it; the fields are those of `Record`."""

    image: Image.Image
    image_id: int
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float32]


# ----------------------------------------------------------------------------------------------------- clean boxes


@dataclass(frozen=True)
class Objects:
    """All objects of a file of annotations, as it has them; the fields are those of `Record`, over all images.

    Args:
        image: int64 [N], which of the images; the others are [N] or [N, 4] as well.
        area: NaN where the file has none.
    """

    image: Sequence[int]
    boxes: Sequence[Sequence[float]]
    labels: Sequence[int]
    crowd: Sequence[bool]
    area: Sequence[float]


def records_of(
    source: str, images: Sequence[tuple[str, int, Size | None]], objects: Objects, name: Callable[[int], str]
) -> list[Record]:
    """A record for each image (file, id, size), with boxes that lie in it.

    Boxes without area, or with a coordinate that is not finite, are dropped first; the others are clipped, and dropped
    where nothing remains. Each kind is counted in one warning, which names a few by `name`.
    """
    of = np.array(objects.image, np.int64)
    given = np.array(objects.boxes, np.float64).reshape(-1, 4)
    owners = set(objects.image)
    # What the annotations do not say about an image without boxes is not needed.
    sizes = [size or (image_size(file) if at in owners else (0, 0)) for at, (file, _, size) in enumerate(images)]
    boxes, kept = _clean(source, given, np.array(sizes, np.float64).reshape(-1, 2)[of], name)
    said = np.array(objects.area, np.float64)
    box_area = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    area = np.where(np.isfinite(said) & (said > 0), said, box_area).astype(np.float32)
    labels, crowd = np.array(objects.labels, np.int64), np.array(objects.crowd, np.bool_)
    order = np.flatnonzero(kept)
    order = order[np.argsort(of[order], kind="stable")]
    members = np.split(order, np.searchsorted(of[order], np.arange(1, len(images))))
    small = boxes.astype(np.float32)
    return [
        Record(file, image_id, size, small[mine], labels[mine], crowd[mine], area[mine])
        for (file, image_id, size), mine in zip(images, members, strict=True)
    ]


def _clean(source: str, boxes: Floats, sizes: Floats, name: Callable[[int], str]) -> tuple[Floats, NDArray[np.bool_]]:
    """Boxes [N, 4] within images of `sizes` [N, 2], and which [N] are left."""
    boxes = np.where(np.isfinite(boxes).all(axis=1, keepdims=True), boxes, 0.0)
    some = np.logical_and.reduce(boxes[:, :2] < boxes[:, 2:], axis=1)
    inside = np.clip(boxes, 0, sizes[:, [1, 0, 1, 0]])
    left = some & np.logical_and.reduce(inside[:, :2] < inside[:, 2:], axis=1)
    changed = left & (np.abs(inside - boxes) > _SLACK).any(axis=1)
    said = []
    for text, which in (
        ("dropped {} without area or not finite", ~some),
        ("dropped {} outside of their images", some & ~left),
        ("clipped {} that reached out of their images", changed),
    ):
        if count := int(which.sum()):
            names = [name(int(at)) for at in np.flatnonzero(which)[: _NAMED + 1]]
            said.append(f"{text.format(f'{count} box' if count == 1 else f'{count} boxes')} ({listed(names)})")
    if said:
        rank_zero_warn(f"{source}: {'; '.join(said)}")
    return inside, left


def listed(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join([*names[:_NAMED], "…"] if len(names) > _NAMED else names)


# ------------------------------------------------------------------------------------------------------ the image


def load(found: Record) -> Sample:
    """Decode the image, and turn its boxes as it was turned.

    By the size that the annotations give they are measured on the stored or on the upright image; where both have that
    size, or none is given, on the stored one.

    Raises:
        ValueError: the image cannot be decoded, or has another size.
    """
    image, orientation = load_oriented(found.file)
    upright = (image.height, image.width)
    stored = upright[::-1] if orientation >= 5 else upright
    if found.size not in (None, stored, upright):
        raise ValueError(
            f"{found.file}: {image.width} × {image.height} pixels, expected {found.size[1]} × {found.size[0]} "
            "as its annotations say"
        )
    boxes = found.boxes if found.size not in (None, stored) else turn(found.boxes, stored, orientation)
    return Sample(image, found.image_id, boxes, found.labels, found.crowd, found.area)


def turn(boxes: NDArray[np.float32], stored: Size, orientation: int) -> NDArray[np.float32]:
    """Boxes [N, 4] on stored pixels to where they are once the EXIF orientation is applied to the image."""
    height, width = stored
    x0, y0, x1, y1 = boxes.T
    if orientation in (2, 3, 7, 8):  # mirrored from left to right, before rows and columns are exchanged
        x0, x1 = width - x1, width - x0
    if orientation in (3, 4, 6, 7):  # mirrored from top to bottom
        y0, y1 = height - y1, height - y0
    if orientation >= 5:
        x0, y0, x1, y1 = y0, x0, y1, x1
    return np.stack([x0, y0, x1, y1], axis=1)
