"""Preprocessing of images for detection, where the aspect ratio stays and images differ in size.

Legend: H height, W width.
"""

import math
from dataclasses import dataclass

from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from multimodal.data.image import Interpolation, Preprocess, ToTensor, Transform

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class DetectionPreprocess(Preprocess):
    """Images of any size and aspect ratio; the defaults are those of DETR (Carion et al. 2020, section 4).

    Args:
        shortest_edge: length in pixels that the shorter side gets.
        longest_edge: length in pixels up to which the longer side may grow; the shorter one then stays shorter.
        category_ids: the id of each class in the files that the weights were trained on; None = its index.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: Interpolation = "bilinear"
    shortest_edge: int = 800
    longest_edge: int = 1333
    category_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels != 3:
            raise ValueError(f"mean has {self.channels} values: expected 3, detection is done on RGB")
        if not 0 < self.shortest_edge <= self.longest_edge:
            raise ValueError(
                f"shortest_edge {self.shortest_edge} and longest_edge {self.longest_edge}: "
                "expected pixels above 0, the shortest first"
            )
        if self.category_ids is not None and len(set(self.category_ids)) != len(self.category_ids):
            raise ValueError("category_ids: an id comes twice, expected one for each class")


def resized_sides(height: int, width: int, shortest_edge: int, longest_edge: int) -> tuple[int, int]:
    """Height and width of an image after DETR's resize, rounded as in the original code.

    Where the longer side is the limit, rounding the shorter one first may let it miss `longest_edge` by a few pixels.
    """
    least, most = min(height, width), max(height, width)
    side = shortest_edge
    if most / least * side > longest_edge:
        # At least 1, where the original code has 0 for very narrow images.
        side = max(1, round(longest_edge * least / most))
    if height < width:
        return side, int(side * width / height)
    return int(side * height / width), side


class DetectionResize:
    """The shorter side to `shortest_edge`, unless the longer one would exceed `longest_edge`."""

    def __init__(self, preprocess: DetectionPreprocess) -> None:
        self.edges = (preprocess.shortest_edge, preprocess.longest_edge)
        self.mode = v2.InterpolationMode(preprocess.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        height, width = resized_sides(image.height, image.width, *self.edges)
        if height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(
                f"an image {image.height} high and {image.width} wide would be resized to {height} by {width} pixels, "
                f"expected at most {Image.MAX_IMAGE_PIXELS}"
            )
        return F.resize(image, [height, width], interpolation=self.mode)


def detection_transform(preprocess: DetectionPreprocess) -> Transform:
    """A PIL image in mode RGB to a float32 tensor [3, H, W]: resize as DETR does, normalise."""
    return v2.Compose([DetectionResize(preprocess), ToTensor(preprocess)])
