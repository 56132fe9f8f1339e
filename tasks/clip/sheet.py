"""A picture of many images, with words below each."""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from multimodal.data import load_image
from multimodal.pretrained.files import write_whole
from tasks.clip.labels import warn

SIDE, LINE, GAP = 160, 18, 8
"""Pixels of an image, of a line of words, and between two images."""
COLUMNS = 8
LIMIT = 400
"""Images on a sheet."""


class Sheet:
    """Images by path, and their words."""

    def __init__(self) -> None:
        self._tiles: list[tuple[str, Sequence[str]]] = []
        self._left_out = 0

    def add(self, path: str, words: Sequence[str]) -> None:
        """The next image, with a line for each of the words."""
        if len(self._tiles) < LIMIT:
            self._tiles.append((path, words))
        else:
            self._left_out += 1

    def save(self, place: str) -> None:
        """Write it as PNG, whole or not at all. It says where there are more images than it holds."""
        if self._left_out:
            warn(f"--sheet {place}: shows the first {LIMIT} of {LIMIT + self._left_out} images")
        content = BytesIO()
        self._draw().save(content, "PNG")
        write_whole(Path(place), content.getbuffer())

    def _draw(self) -> Image.Image:
        columns = max(1, min(COLUMNS, len(self._tiles)))
        lines = max((len(words) for _, words in self._tiles), default=0)
        wide, high = SIDE + GAP, SIDE + lines * LINE + GAP
        rows = max(1, math.ceil(len(self._tiles) / columns))
        picture = Image.new("RGB", (columns * wide + GAP, rows * high + GAP), "white")
        canvas = ImageDraw.Draw(picture)
        font = _font()
        for at, (path, words) in enumerate(self._tiles):
            left, top = GAP + at % columns * wide, GAP + at // columns * high
            picture.paste(_tile(path), (left, top))
            for line, text in enumerate(words):
                fitted = _fitted(canvas, text, font)
                canvas.text((left, top + SIDE + line * LINE), fitted, fill="black", font=font)
        return picture


def _tile(path: str) -> Image.Image:
    """The whole image in the middle of a square; an empty square where it is gone meanwhile."""
    tile = Image.new("RGB", (SIDE, SIDE), "#eeeeee")
    try:
        image = load_image(path)
    except ValueError:
        return tile
    factor = SIDE / max(image.size)
    width, height = (max(1, round(side * factor)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    tile.paste(image, ((SIDE - width) // 2, (SIDE - height) // 2))
    return tile


def _font() -> ImageFont.FreeTypeFont:
    """One that knows more letters than Pillow's own."""
    import matplotlib  # takes half a second, which only those wait for who want a sheet

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size=12)


def _fitted(canvas: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont) -> str:
    """As much of a text as is no wider than an image."""
    text = " ".join(text[:200].split())
    if canvas.textlength(text, font=font) <= SIDE:
        return text
    while text and canvas.textlength(text + "…", font=font) > SIDE:
        text = text[:-1]
    return text + "…"
