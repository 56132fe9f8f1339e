"""Image files to tensors: decoding, and the preprocessing that belongs to a set of weights.

Legend: C channels, H height, W width.
"""

import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self, get_args

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

IMAGE_EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)
# Pillow's formats for pictures. Not all that it knows: to decode EPS it would run another program.
FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TGA", "TIFF", "WEBP")
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
CropMode = Literal["center", "squash"]

# What Pillow's decoders raise on damaged files, found by decoding thousands of them.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
)


# ---------------------------------------------------------------------------------------------------------- files


def natural_key(text: str) -> tuple[list[str | int], str]:
    """Sort key in which class 2 comes before class 10; 01 and 1 still differ."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"([0-9]+)", text))], text


def list_images(folder: str | os.PathLike[str]) -> list[Path]:
    """All files below `folder` with the name of an image, in natural order; hidden files and folders are left out.

    Links are followed, each folder once.
    """
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(place, name)
            for name in files
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS
        ]
    return sorted(found, key=lambda path: natural_key(path.as_posix()))


def load_image(source: str | os.PathLike[str] | bytes | BinaryIO, channels: int = 3) -> Image.Image:
    """Decode an image file as mode L (`channels` = 1) or RGB (3).

    The EXIF orientation is applied, 16-bit grey is scaled by its 16-bit range, transparency is composited on white, and
    of an animation the first picture is taken.

    Raises:
        ValueError: one line "file: what was found, what was expected" for whatever is not a whole image of sane size.
    """
    return load_oriented(source, channels)[0]


def load_oriented(source: str | os.PathLike[str] | bytes | BinaryIO, channels: int = 3) -> tuple[Image.Image, int]:
    """As `load_image`, and the EXIF orientation from 1 to 8 that was applied, by which whatever was measured on the
    stored pixels is to be turned as well; 1 is upright.
    """
    if channels not in (1, 3):
        raise ValueError(f"image channels {channels}: images are decoded with 1 (grey) or 3 (RGB)")
    with _opened(source) as image:
        before = _orientation(image)
        image.load()
        upright, orientation = _upright(image)
        if before != 1 and _orientation(image) == 1:  # Pillow turns a TIFF while it decodes it
            orientation = before
        return _converted(upright, "L" if channels == 1 else "RGB"), orientation


def image_size(source: str | os.PathLike[str] | bytes | BinaryIO) -> tuple[int, int]:
    """Height and width in pixels, by the header alone; errors are those of `load_image`."""
    with _opened(source) as image:
        return image.height, image.width


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes | BinaryIO) -> Iterator[Image.Image]:
    """The image, not yet decoded; whatever goes wrong in the body is told in one line as well."""
    name = _name(source)
    try:
        with Image.open(_stream(source), formats=_formats()) as image:
            yield image
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        found = f"{pixels.group()} pixels" if pixels else str(error)
        raise ValueError(f"{name}: {found}, expected at most {2 * (Image.MAX_IMAGE_PIXELS or 0)}") from None
    except UnidentifiedImageError:
        raise ValueError(f"{name}: no known image format inside, expected an image such as JPEG or PNG") from None
    except _NotAnImage as error:
        raise ValueError(f"{name}: {error}") from None
    except _DECODING_ERRORS as error:
        raise ValueError(f"{name}: damaged ({_one_line(error)}), expected a whole image") from None


@cache
def _formats() -> list[str]:
    """Those of `FORMATS` that this build of Pillow has."""
    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


class _NotAnImage(Exception):
    """What was found and what was expected, still without the file's name."""


def _name(source: Any) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return str(getattr(source, "name", None) or "image data")


def _stream(source: str | os.PathLike[str] | bytes | BinaryIO) -> str | BinaryIO:
    if isinstance(source, bytes):
        if not source:
            raise _NotAnImage("0 bytes, expected an image")
        return BytesIO(source)
    if not isinstance(source, str | os.PathLike):
        return source
    path = Path(source)
    if path.is_dir():
        raise _NotAnImage("a folder, expected an image file")
    if not path.exists():
        raise _NotAnImage("no such file, expected an image")
    if not path.is_file():
        raise _NotAnImage("no regular file, expected an image file")
    if path.stat().st_size == 0:
        raise _NotAnImage("0 bytes, expected an image")
    return os.fspath(path)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _DECODING_ERRORS:
        return 1
    return orientation if orientation in range(1, 9) else 1


def _upright(image: Image.Image) -> tuple[Image.Image, int]:
    """And the orientation that was applied."""
    try:
        orientation = _orientation(image)
        return ImageOps.exif_transpose(image), orientation
    except _DECODING_ERRORS:
        # The pixels are whole and the note about the camera is not: every viewer shows such a file as it lies.
        return image, 1


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Any mode to L or RGB."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _eight_bit(image)
    if image.has_transparency_data:
        shown = Image.new("RGBA", image.size, "white")
        shown.alpha_composite(image.convert("RGBA"))
        image = shown
    if image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    # A copy, since `image` may still belong to the file that is about to be closed.
    return image.convert(mode) if image.mode != mode else image.copy()


def _eight_bit(image: Image.Image) -> Image.Image:
    """Grey values of more than 8 bits to mode L, by the range of the format and not by that of the picture."""
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    limit = 1.0 if image.mode == "F" else 65535.0
    # "not" so that a NaN is refused as well.
    if not (low >= 0 and high <= limit):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise _NotAnImage(f"{kind} values from {low:g} to {high:g}, expected 0 to {limit:g}")
    grey = Image.fromarray(np.rint(values * (255.0 / limit)).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


# ----------------------------------------------------------------------------------------------------- transforms


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How the images looked that a set of weights was trained on; travels with the weights.

    Args:
        mean: subtracted from each channel, on a scale where white is 1; as many values as there are channels.
        std: what each channel is then divided by.
        interpolation: nearest, bilinear, bicubic or lanczos, always antialiased.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} values and std {len(self.std)}: expected one a channel in both"
            )
        if not all(math.isfinite(value) for value in self.mean):
            raise ValueError(f"mean {list(self.mean)}: expected finite numbers")
        if not all(math.isfinite(value) and value > 0 for value in self.std):
            raise ValueError(f"std {list(self.std)}: expected finite numbers above 0")
        self._one_of("interpolation", get_args(Interpolation))

    def _one_of(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(choices)}")

    @property
    def channels(self) -> int:
        return len(self.mean)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the form that checkpoints hold."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        known = {field.name: field.default is MISSING for field in fields(cls)}
        if unknown := sorted(set(record) - set(known)):
            raise ValueError(f"preprocess record has {', '.join(unknown)}: expected {', '.join(sorted(known))}")
        if missing := sorted({name for name, needed in known.items() if needed} - set(record)):
            raise ValueError(f"preprocess record lacks {', '.join(missing)}")
        return cls(**record)


@dataclass(frozen=True, kw_only=True)
class ImagePreprocess(Preprocess):
    """Images of one size.

    Args:
        size: height and width in pixels of what the network sees.
        crop_pct: `size` as a fraction of what the image is resized to before its centre is cut out; in (0, 1].
        crop_mode: center keeps the aspect ratio and loses the edges of the longer side, squash does not keep it.
    """

    size: tuple[int, int]
    crop_pct: float = 1.0
    crop_mode: CropMode = "center"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.size) != 2 or not all(isinstance(side, int) and side > 0 for side in self.size):
            raise ValueError(f"image size {list(self.size)}: expected height and width, both above 0")
        self._one_of("crop_mode", get_args(CropMode))
        if not 0 < self.crop_pct <= 1:
            raise ValueError(f"crop_pct {self.crop_pct}: expected a number above 0 and up to 1")


Transform = Callable[[Image.Image], Tensor]


def eval_transform(preprocess: ImagePreprocess) -> Transform:
    """A PIL image of `preprocess.channels` to a float32 tensor [C, H, W]: resize, cut out the centre, normalise.

    The numbers are those of timm's evaluation transform with the same settings.
    """
    return v2.Compose([Resize(preprocess), v2.CenterCrop(preprocess.size), ToTensor(preprocess)])


class Resize:
    """To `size` / `crop_pct`: both sides (squash), or the one that then just covers it (center)."""

    def __init__(self, preprocess: ImagePreprocess) -> None:
        height, width = preprocess.size
        self.target = (math.floor(height / preprocess.crop_pct), math.floor(width / preprocess.crop_pct))
        self.squash = preprocess.crop_mode == "squash"
        self.mode = v2.InterpolationMode(preprocess.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = self.sides(image.height, image.width)
        if height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(
                f"an image {image.height} high and {image.width} wide is too narrow: resized to cover {self.target} "
                f"it has {height * width} pixels; expected a less extreme aspect ratio, or crop_mode squash"
            )
        return F.resize(image, [height, width], interpolation=self.mode)

    def sides(self, height: int, width: int) -> tuple[int, int]:
        target_height, target_width = self.target
        if self.squash:
            return self.target
        if target_height != target_width:
            ratio = min(height / target_height, width / target_width)
            return round(height / ratio), round(width / ratio)
        # Rounded down, where the general case above rounds to the nearest: so do torchvision and timm.
        if height <= width:
            return target_height, int(target_height * width / height)
        return int(target_width * height / width), target_width


class ToTensor:
    """A PIL image to a normalised float32 tensor [C, H, W]."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.mean = torch.tensor(preprocess.mean).view(-1, 1, 1)
        self.std = torch.tensor(preprocess.std).view(-1, 1, 1)

    def __call__(self, image: Image.Image) -> Tensor:
        # Divided by 255, not multiplied by its inverse as torchvision v2 does: equal to timm's to the last bit.
        values = F.pil_to_tensor(image).to(torch.float32).div_(255)
        if len(values) != len(self.mean):
            raise ValueError(f"an image of {len(values)} channels: expected {len(self.mean)}, as mean and std have")
        return values.sub_(self.mean).div_(self.std)
