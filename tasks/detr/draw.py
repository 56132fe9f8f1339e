"""Detections drawn on their image, and where such pictures are kept."""

import colorsys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from multimodal.pretrained.files import write_whole

Color = tuple[int, int, int]

LEGIBLE = 640
"""Pixels of the longer side up to which a picture is enlarged."""


class Detection(NamedTuple):
    """One object that was found."""

    label: int
    """Its class."""
    name: str
    """What the class is called."""
    score: float
    """0 … 1."""
    box: tuple[float, float, float, float]
    """Left, top, right and bottom, in pixels of the upright image; may reach beyond it."""


def draw(image: Image.Image, detections: Sequence[Detection]) -> Image.Image:
    """A copy of an RGB image with boxes, names and scores on it; what scored highest lies on top.

    A small image is enlarged by a whole factor, since names would hide it.
    """
    factor = max(1, LEGIBLE // max(image.size))
    picture = image.resize([factor * side for side in image.size], Image.Resampling.NEAREST)
    canvas = ImageDraw.Draw(picture)
    unit = max(1, round(min(picture.size) / 250))
    font = ImageFont.load_default(size=max(10, 6 + 5 * unit))
    placed = [
        (found, _within([factor * value for value in found.box], picture.size))
        for found in sorted(detections, key=lambda found: found.score)
    ]
    for found, box in placed:
        canvas.rectangle(box, outline=class_color(found.label), width=unit)
    for found, box in placed:
        _label(canvas, f"{found.name} {found.score:.2f}", box, class_color(found.label), font)
    return picture


def class_color(label: int) -> Color:
    """Bright, and far from those of the classes next to it: hues by the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb((label * 0.618034) % 1, 0.85, (1.0, 0.8, 0.6)[label // 12 % 3])
    return round(255 * red), round(255 * green), round(255 * blue)


def _within(box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box's part within the image, at least a pixel large."""
    (left, top, right, bottom), (width, height) = box, size
    x0, y0 = (min(max(round(value), 0), side - 1) for value, side in ((left, width), (top, height)))
    x1, y1 = (min(max(round(value), 0), side - 1) for value, side in ((right, width), (bottom, height)))
    return x0, y0, max(x0, x1), max(y0, y1)


def _label(
    canvas: ImageDraw.ImageDraw,
    text: str,
    box: tuple[int, int, int, int],
    color: Color,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """The text on a ground of the box's colour: above the box, or inside where there is no room."""
    width, height = canvas.im.size
    left, top, right, bottom = (round(value) for value in canvas.textbbox((0, 0), text, font=font))
    pad = max(1, (bottom - top) // 6)
    wide, high = right - left + 2 * pad, bottom - top + 2 * pad
    x = max(0, min(box[0], width - wide))
    y = box[1] - high if box[1] >= high else min(box[1], max(0, height - high))
    canvas.rectangle((x, y, x + wide - 1, y + high - 1), fill=color)
    red, green, blue = color
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    canvas.text((x + pad - left, y + pad - top), text, fill="white" if dark else "black", font=font)


class Pictures:
    """A folder of PNG files, named after the images that are drawn on.

    Raises:
        ValueError: one of the images lies in that folder, where a picture could take its place.
    """

    def __init__(self, folder: str, paths: Sequence[str]) -> None:
        self.folder = Path(folder)
        self.taken: set[str] = set()
        inside = [path for path in paths if Path(path).parent.resolve() == self.folder.resolve()]
        if inside:
            raise ValueError(f"--draw {folder}: {inside[0]} lies there, expected a folder without images to predict")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--draw {folder}: no folder can be made there ({error.strerror})") from error

    def save(self, path: str, picture: Image.Image) -> None:
        """Write the picture of an image; those of images of one name are numbered."""
        stem = name = Path(path).stem
        count = 1
        while name.casefold() in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name.casefold())
        content = BytesIO()
        picture.save(content, "PNG")
        write_whole(self.folder / f"{name}.png", content.getbuffer())
