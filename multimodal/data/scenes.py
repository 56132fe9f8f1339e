"""Drawn scenes with boxes and captions: data to try detection and contrast with text on that come with the suite.

A scene is a function of (seed, index). What draws it are NumPy's generator and the four operations and the root, which
round alike everywhere; no sine, no font, no drawing library.

Legend: H height, W width, in pixels.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Array = NDArray[np.floating]
Box = tuple[int, int, int, int]
Pair = tuple[str, str]
"""A colour and a shape."""

SIDE = 128
"""Height and width of a scene."""
LEAST, MOST = 8, 64
"""The sides of an object, in pixels."""
COLORS = {
    "red": (225, 25, 35),
    "orange": (250, 130, 10),
    "yellow": (250, 235, 30),
    "green": (20, 170, 40),
    "cyan": (20, 225, 235),
    "blue": (25, 55, 230),
    "purple": (125, 20, 170),
    "pink": (255, 95, 190),
}
"""Saturated, where the grounds are not."""
_NUMBERS = ("", "a", "two", "three", "four", "five", "six", "seven", "eight")
_MAX_IOU = 0.5
_LEAST_VISIBLE = 0.4
"""Share of an object that those above it leave."""
_TRIES = 20


@dataclass(frozen=True)
class Scene:
    """What was drawn. Objects stand from the largest to the smallest, and a later one lies above the earlier ones.

    Args:
        image: mode RGB, 128 × 128 pixels.
        boxes: x0, y0, x1, y1 in pixels of each object, tight around the whole of it, also where another hides a part.
        shapes: of each object, one of `SHAPES`.
        colors: of each object, one of `COLORS`.
        caption: such as "a red circle, a blue star and two green rings".
    """

    image: Image.Image
    boxes: tuple[Box, ...]
    shapes: tuple[str, ...]
    colors: tuple[str, ...]
    caption: str


def draw_scene(
    seed: int, index: int, *, objects: tuple[int, int] = (0, 8), pairs: Sequence[Pair] | None = None
) -> Scene:
    """The scene of that number, always the same.

    Args:
        seed: which series of scenes.
        index: which scene of that series.
        objects: least and greatest number of objects, up to 8. Where the least is 0, every tenth scene is empty and
            the others have at least one. A scene gets fewer where no place is left for another.
        pairs: what an object may be; None = any of `PAIRS`.
    """
    low, high = objects
    if not 0 <= low <= high <= 8 or high < 1:
        raise ValueError(f"objects {list(objects)}: expected least and greatest number, from 0 to 8")
    pairs = PAIRS if pairs is None else pairs
    rng = np.random.default_rng((seed, index))
    empty = low == 0 and index % 10 == 9
    count = 0 if empty else int(rng.integers(max(1, low), high + 1))
    canvas = _ground(rng)
    boxes: list[Box] = []
    kinds: list[Pair] = []
    # What is still to be seen of each object, [objects, H, W].
    seen = np.zeros((count, SIDE, SIDE))
    whole = np.zeros(count)
    for width, height in _sizes(rng, count):
        color, shape = pairs[int(rng.integers(len(pairs)))]
        paint = np.clip(np.array(COLORS[color]) + rng.integers(-15, 16, 3), 0, 255)
        cover = _cover(shape, width, height)
        alike = [other == color for other, _ in kinds]
        box = _place(rng, cover, boxes, alike, seen, whole)
        if box is None:
            continue
        rows, columns = slice(box[1], box[3]), slice(box[0], box[2])
        seen[: len(boxes), rows, columns] *= 1 - cover
        seen[len(boxes), rows, columns] = cover
        whole[len(boxes)] = cover.sum()
        canvas[rows, columns] += cover[..., None] * (paint - canvas[rows, columns])
        boxes.append(box)
        kinds.append((color, shape))
    image = Image.fromarray(np.rint(canvas).astype(np.uint8))
    colors, shapes = tuple(color for color, _ in kinds), tuple(shape for _, shape in kinds)
    return Scene(image, tuple(boxes), shapes, colors, describe(kinds))


def describe(kinds: Sequence[Pair]) -> str:
    """What is to be seen, in words, such as "a red circle and two green rings"; equal objects are counted, up to 8."""
    parts = []
    for (color, shape), count in Counter(kinds).items():
        article = "an" if count == 1 and color == "orange" else _NUMBERS[count]
        plural = "" if count == 1 else "es" if shape.endswith("s") else "s"
        parts.append(f"{article} {color} {shape}{plural}")
    if not parts:
        return "an empty scene"
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


# ----------------------------------------------------------------------------------------------------- placement


def _sizes(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Widths and heights, the largest first, so that no object lies below a larger one."""
    sizes = []
    for _ in range(count):
        longer = int(rng.integers(LEAST, MOST + 1))
        shorter = int(rng.integers(max(LEAST, math.ceil(0.75 * longer)), longer + 1))
        sizes.append((longer, shorter) if rng.random() < 0.5 else (shorter, longer))
    return sorted(sizes, key=lambda size: -size[0] * size[1])


def _place(
    rng: np.random.Generator, cover: Array, boxes: list[Box], alike: list[bool], seen: Array, whole: Array
) -> Box | None:
    """A place that leaves enough to be seen of every other object, or None where it is not found.

    Objects whose colours are `alike` do not touch: what lies above would not stand out.
    """
    height, width = cover.shape
    for _ in range(_TRIES):
        left, top = int(rng.integers(SIDE - width + 1)), int(rng.integers(SIDE - height + 1))
        box = (left, top, left + width, top + height)
        touched = [at for at, other in enumerate(boxes) if _overlap(box, other)]
        if any(alike[at] or _iou(box, boxes[at]) > _MAX_IOU for at in touched):
            continue
        hidden = [(seen[at, top : box[3], left : box[2]] * cover).sum() for at in touched]
        if all(seen[at].sum() - h >= _LEAST_VISIBLE * whole[at] for at, h in zip(touched, hidden, strict=True)):
            return box
    return None


def _overlap(one: Box, other: Box) -> int:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0, width) * max(0, height)


def _iou(one: Box, other: Box) -> float:
    shared = _overlap(one, other)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared)


# -------------------------------------------------------------------------------------------------------- shapes
# Each function gives the distance in pixels by which points lie inside the shape that fills a box, negative outside.
# x [1, W] and y [H, 1] are the points; w and h the box's sides.


def _ellipse(x: Array, y: Array, center: tuple[float, float], radii: tuple[float, float]) -> Array:
    """To first order, which is exact on the edge, where it matters."""
    u, v = (x - center[0]) / radii[0], (y - center[1]) / radii[1]
    slope = np.sqrt((u / radii[0]) ** 2 + (v / radii[1]) ** 2)
    return (1 - u * u - v * v) / (2 * slope + 1e-9)


def _edges(x: Array, y: Array, corners: list[tuple[float, float]]) -> list[Array]:
    """For each line from a corner to the next, clockwise on the picture: how far points lie on its right."""
    distances = []
    for (x0, y0), (x1, y1) in zip(corners, [*corners[1:], corners[0]], strict=True):
        dx, dy = x1 - x0, y1 - y0
        distances.append((dx * (y - y0) - dy * (x - x0)) / np.sqrt(dx * dx + dy * dy))
    return distances


def _within(x: Array, y: Array, w: float, h: float, share: tuple[float, float]) -> Array:
    """A rectangle in the box's middle, of those shares of its sides."""
    across, down = (1 - share[0]) / 2 * w, (1 - share[1]) / 2 * h
    return np.minimum(np.minimum(x - across, w - across - x), np.minimum(y - down, h - down - y))


def _circle(x: Array, y: Array, w: float, h: float) -> Array:
    return _ellipse(x, y, (w / 2, h / 2), (w / 2, h / 2))


def _ring(x: Array, y: Array, w: float, h: float) -> Array:
    return np.minimum(_circle(x, y, w, h), -_ellipse(x, y, (w / 2, h / 2), (0.27 * w, 0.27 * h)))


def _square(x: Array, y: Array, w: float, h: float) -> Array:
    return _within(x, y, w, h, (1, 1))


def _triangle(x: Array, y: Array, w: float, h: float) -> Array:
    return np.minimum.reduce(_edges(x, y, [(w / 2, 0), (w, h), (0, h)]))


def _diamond(x: Array, y: Array, w: float, h: float) -> Array:
    return np.minimum.reduce(_edges(x, y, [(w / 2, 0), (w, h / 2), (w / 2, h), (0, h / 2)]))


def _cross(x: Array, y: Array, w: float, h: float) -> Array:
    return np.maximum(_within(x, y, w, h, (1, 0.34)), _within(x, y, w, h, (0.34, 1)))


def _star(x: Array, y: Array, w: float, h: float) -> Array:
    """Five lines, each through two tips: inside are the points on the right of at least four of them."""
    tips = [(0.5, 0.0), (0.809017, 1.0), (0.0, 0.381966), (1.0, 0.381966), (0.190983, 1.0)]
    lines = _edges(x, y, [(a * w, b * h) for a, b in tips])
    return np.sort(np.stack(lines), axis=0)[1]


def _crescent(x: Array, y: Array, w: float, h: float) -> Array:
    """A disc without another one, 0.85 as large and 0.55 of the radius to its right; the tips are 0.527 from centre."""
    center, radii = (w / 1.527, h / 2), (w / 1.527, h / 2)
    bite = _ellipse(x, y, (center[0] + 0.55 * radii[0], h / 2), (0.85 * radii[0], 0.85 * radii[1]))
    return np.minimum(_ellipse(x, y, center, radii), -bite)


_SHAPES: dict[str, Callable[[Array, Array, float, float], Array]] = {
    "circle": _circle,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "cross": _cross,
    "star": _star,
    "crescent": _crescent,
}
SHAPES = tuple(_SHAPES)
"""The classes."""
PAIRS: tuple[Pair, ...] = tuple(product(COLORS, SHAPES))
"""Whatever an object may be."""


def _cover(shape: str, width: int, height: int) -> Array:
    """How much of each pixel [H, W] the shape covers, from 0 to 1."""
    x, y = np.arange(width)[None, :] + 0.5, np.arange(height)[:, None] + 0.5
    return np.clip(_SHAPES[shape](x, y, width, height) + 0.5, 0, 1)


# ------------------------------------------------------------------------------------------------------- grounds


def _ground(rng: np.random.Generator) -> Array:
    """A pattern [H, W, 3] between two greyish colours, with grain."""
    pattern = _GROUNDS[int(rng.integers(len(_GROUNDS)))](rng)
    first, second = (rng.integers(50, 196) + rng.integers(-18, 19, 3) for _ in range(2))
    grain = rng.integers(-6, 7, (SIDE, SIDE, 1))
    return first + pattern[..., None] * (second - first) + grain


def _coordinates() -> tuple[Array, Array]:
    return np.arange(SIDE, dtype=np.float64)[None, :], np.arange(SIDE, dtype=np.float64)[:, None]


def _slanted(rng: np.random.Generator) -> Array:
    """A coordinate along one of a few directions, in pixels or so."""
    x, y = _coordinates()
    across, down = int(rng.integers(-2, 3)), int(rng.integers(1, 3))
    return (across * x + down * y) / (abs(across) + down)


def _gradient(rng: np.random.Generator) -> Array:
    along = _slanted(rng)
    along = along - along.min()
    return np.asarray(along / along.max())


def _noise(rng: np.random.Generator) -> Array:
    return rng.random((SIDE, SIDE))


def _stripes(rng: np.random.Generator) -> Array:
    period = int(rng.integers(6, 33))
    return np.asarray((_slanted(rng) + int(rng.integers(period))) % period < period / 2, np.float64)


def _checks(rng: np.random.Generator) -> Array:
    x, y = _coordinates()
    side = int(rng.integers(4, 25))
    return (x // side + y // side) % 2


def _blobs(rng: np.random.Generator) -> Array:
    """A few random values, and smooth ways between them."""
    cells = int(rng.integers(3, 13))
    values = rng.random((cells + 1, cells + 1))
    at = np.arange(SIDE) * (cells / SIDE)
    low = at.astype(np.int64)
    part = at - low
    part = part * part * (3 - 2 * part)
    rows = values[low] + part[:, None] * (values[low + 1] - values[low])
    return np.asarray(rows[:, low] + part * (rows[:, low + 1] - rows[:, low]))


_GROUNDS = (_gradient, _noise, _stripes, _checks, _blobs)
