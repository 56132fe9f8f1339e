"""Random changes that training makes to images and their boxes alike.

Legend: N boxes, H height, W width.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from multimodal.data import DetectionPreprocess
from multimodal.data.detection import resized_sides
from tasks.detr.records import Sample

# DETR, section A.4: of the shorter side, 800 pixels, shares of 480 to 800 in steps of 32; half of the images are cut
# from one of 400, 500 or 600, with sides of 384 to 600.
SCALES = tuple(side / 800 for side in range(480, 801, 32))
_CROP_SCALES = (0.5, 0.625, 0.75)
_CROP_SIDES = (0.48, 0.75)


@dataclass(frozen=True, kw_only=True)
class DetectionAugmentation:
    """What training does to images and boxes; what is None is off, or left to the data's default.

    Args:
        horizontal_flip: Probability of an image mirrored from left to right.
        vertical_flip: Probability of one mirrored from top to bottom; right where there is no up, as in microscopy.
        scales: Shares of shortest_edge, of which each image gets one as its shorter side; [1] = always all of it.
        crop: Probability that a random part of the image takes its place, as in DETR.
        color_jitter: Greatest change of brightness, contrast and saturation, as a share of each.
    """

    horizontal_flip: float | None = None
    vertical_flip: float | None = None
    scales: tuple[float, ...] | None = None
    crop: float | None = None
    color_jitter: float | None = None

    def __post_init__(self) -> None:
        for name in ("horizontal_flip", "vertical_flip", "crop", "color_jitter"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, expected a number from 0 to 1")
        if self.scales is not None and not (self.scales and all(0 < scale <= 2 for scale in self.scales)):
            raise ValueError(f"scales is {list(self.scales)}, expected shares of shortest_edge, above 0 and up to 2")

    def over(self, default: "DetectionAugmentation") -> "DetectionAugmentation":
        """This one, with what it leaves None taken from `default`."""
        return replace(default, **{name: value for name, value in asdict(self).items() if value is not None})


class AugmentDetection:
    """A changed sample of random size, not yet normalised; draws from torch's CPU generator (`multimodal.data.seeded`).

    Boxes are clipped to what is left of the image, and objects of which nothing is left are dropped.
    """

    def __init__(self, preprocess: DetectionPreprocess, augmentation: DetectionAugmentation) -> None:
        self.edges = (preprocess.shortest_edge, preprocess.longest_edge)
        self.mode = v2.InterpolationMode(preprocess.interpolation)
        self.scales = augmentation.scales or (1.0,)
        self.crop = augmentation.crop or 0.0
        steps: list[Callable[..., Any]] = []
        if augmentation.horizontal_flip:
            steps.append(v2.RandomHorizontalFlip(augmentation.horizontal_flip))
        if augmentation.vertical_flip:
            steps.append(v2.RandomVerticalFlip(augmentation.vertical_flip))
        if change := augmentation.color_jitter:
            steps.append(v2.ColorJitter(change, change, change))
        self.flips_and_colors = v2.Compose(steps) if steps else None

    def __call__(self, sample: Sample) -> Sample:
        height, width = sample.image.height, sample.image.width
        boxes: Any = tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=(height, width))
        image: Any = sample.image
        if torch.rand(()) < self.crop:
            place = self._place(height, width)
            image, boxes = F.crop(image, *place), F.crop(boxes, *place)
        sides = resized_sides(image.height, image.width, *self._edges(_choice(self.scales)))
        image, boxes = F.resize(image, list(sides), self.mode), F.resize(boxes, list(sides))
        if self.flips_and_colors:
            image, boxes = self.flips_and_colors(image, boxes)
        return _with(sample, image, np.asarray(boxes))

    def _edges(self, scale: float) -> tuple[int, int]:
        """Limits of the shorter and the longer side; the latter is the same at every scale, as in DETR."""
        shortest, longest = self.edges
        return max(1, round(shortest * scale)), max(longest, round(shortest * scale))

    def _place(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Top, left, height and width of a part: as DETR takes it from a resized image, but of the image itself."""
        shortest, longest = self.edges
        share = _choice(_CROP_SCALES)
        sides = resized_sides(height, width, max(1, round(shortest * share)), max(1, round(longest * share)))
        least, most = (round(shortest * side) for side in _CROP_SIDES)
        spans = []
        for whole, resized in zip((height, width), sides, strict=True):
            length = _between(min(least, resized), min(most, resized))
            first = _between(0, resized - length)
            start, end = round(first * whole / resized), round((first + length) * whole / resized)
            start = min(start, whole - 1)
            spans.append((start, max(1, end - start)))
        (top, rows), (left, columns) = spans
        return top, left, rows, columns


def _choice(values: tuple[float, ...]) -> float:
    return values[int(torch.randint(len(values), ()))]


def _between(low: int, high: int) -> int:
    """Both included."""
    return int(torch.randint(low, high + 1, ()))


def _with(sample: Sample, image: Image.Image, boxes: Any) -> Sample:
    """The sample with another image and its objects' boxes, those without area left out."""
    left = np.logical_and.reduce(boxes[:, :2] < boxes[:, 2:], axis=1)
    return replace(
        sample,
        image=image,
        boxes=boxes[left],
        labels=sample.labels[left],
        crowd=sample.crowd[left],
        area=sample.area[left],
    )
