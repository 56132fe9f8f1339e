"""Random changes that training makes to images."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image, ImageFilter
from torchvision.transforms import v2

from multimodal.data.image import ImagePreprocess, Resize, ToTensor, Transform

WHOLE = (1.0, 1.0)
"""The crop scale that keeps all of an image."""
_RAND_AUGMENT_STRENGTHS = 31


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What training does to an image before the network sees it; what is None is off, or left to the data's default.

    Args:
        crop_scale: Least and greatest share of the area that a random crop keeps; 1 and 1 cut out the centre, as
            evaluation does.
        crop_ratio: Least and greatest width / height of that crop; 3/4 and 4/3 where it is None.
        crop_padding: Width in pixels of a mirrored border around the resized image, from which a crop is then taken
            anywhere; instead of crop_scale.
        horizontal_flip: Probability of a mirrored image.
        rotation: Greatest angle in degrees, either way.
        translation: Greatest shift as a share of the side, in each direction.
        zoom: Greatest change of scale, either way, as a share.
        rand_augment: RandAugment (Cubuk et al. 2020): how many operations, and how strong, from 0 to 30.
        three_augment: DeiT III's 3-Augment (Touvron et al. 2022): each image is made grey, solarized or blurred.
        color_jitter: Greatest change of brightness, contrast and saturation, as a share of each.
        erasing: Probability that a rectangle is replaced by noise (Zhong et al. 2020).
    """

    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] | None = None
    crop_padding: int | None = None
    horizontal_flip: float | None = None
    rotation: float | None = None
    translation: float | None = None
    zoom: float | None = None
    rand_augment: tuple[int, int] | None = None
    three_augment: bool | None = None
    color_jitter: float | None = None
    erasing: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            span = getattr(self, name)
            if span is not None and not 0 < span[0] <= span[1] <= limit:
                raise ValueError(f"{name} is {list(span)}, expected 0 < least <= greatest <= {limit:g}")
        for name, limit in (
            ("horizontal_flip", 1.0),
            ("rotation", 180.0),
            ("translation", 1.0),
            ("zoom", 0.99),
            ("color_jitter", 1.0),
            ("erasing", 1.0),
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= limit:
                raise ValueError(f"{name} is {value}, expected a number from 0 to {limit:g}")
        if self.crop_padding is not None and self.crop_padding < 0:
            raise ValueError(f"crop_padding is {self.crop_padding}, expected at least 0")
        if self.crop_padding and self._crops_at_random:
            raise ValueError(
                f"crop_padding is {self.crop_padding} and crop_scale {list(self.crop_scale or ())}, expected one of "
                "them: crop_padding 0, or crop_scale [1, 1]"
            )
        if self.rand_augment is not None:
            count, strength = self.rand_augment
            if count < 0 or not 0 <= strength < _RAND_AUGMENT_STRENGTHS:
                raise ValueError(
                    f"rand_augment is {[count, strength]}, expected a number of operations and a strength from 0 to "
                    f"{_RAND_AUGMENT_STRENGTHS - 1}"
                )

    @property
    def _crops_at_random(self) -> bool:
        return self.crop_scale not in (None, WHOLE)

    def over(self, default: "Augmentation") -> "Augmentation":
        """This one, with what it leaves None taken from `default`."""
        return Augmentation(**{**asdict(default), **{name: x for name, x in asdict(self).items() if x is not None}})


def train_transform(preprocess: ImagePreprocess, augmentation: Augmentation) -> Transform:
    """As `eval_transform`, with random changes drawn from torch's CPU generator (see `multimodal.data.seeded`)."""
    steps = [*_crop(preprocess, augmentation), *_geometry(augmentation), *_colors(preprocess, augmentation)]
    steps.append(ToTensor(preprocess))
    if augmentation.erasing:  # of normalised values, so that the noise has the mean and spread of the data
        steps.append(v2.RandomErasing(augmentation.erasing, value="random"))
    return v2.Compose(steps)


Steps = list[Callable[[Any], Any]]


def _crop(preprocess: ImagePreprocess, augmentation: Augmentation) -> Steps:
    if augmentation.crop_scale not in (None, WHOLE):
        ratio, mode = augmentation.crop_ratio or (3 / 4, 4 / 3), v2.InterpolationMode(preprocess.interpolation)
        return [v2.RandomResizedCrop(preprocess.size, augmentation.crop_scale, ratio, interpolation=mode)]
    if augmentation.crop_padding:
        border, least = augmentation.crop_padding, min(preprocess.size)
        if border >= least:
            raise ValueError(f"crop_padding is {border}, expected less than the image's side, {least}")
        return [Resize(preprocess), v2.RandomCrop(preprocess.size, padding=border, padding_mode="reflect")]
    return [Resize(preprocess), v2.CenterCrop(preprocess.size)]


def _geometry(augmentation: Augmentation) -> Steps:
    steps: Steps = []
    if augmentation.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip(augmentation.horizontal_flip))
    if augmentation.rotation or augmentation.translation or augmentation.zoom:
        shift, zoom = augmentation.translation or 0.0, augmentation.zoom or 0.0
        steps.append(
            v2.RandomAffine(
                degrees=augmentation.rotation or 0.0,
                translate=(shift, shift),
                scale=(1 - zoom, 1 + zoom),
                # Bilinear would blur small images, which evaluation then shows sharp.
                interpolation=v2.InterpolationMode.BICUBIC,
            )
        )
    return steps


def _colors(preprocess: ImagePreprocess, augmentation: Augmentation) -> Steps:
    steps: Steps = []
    if augmentation.rand_augment and augmentation.rand_augment[0]:
        count, strength = augmentation.rand_augment
        mean_color = [round(255 * value) for value in preprocess.mean]
        steps.append(v2.RandAugment(count, strength, _RAND_AUGMENT_STRENGTHS, fill=mean_color))
    if augmentation.three_augment:
        steps.append(v2.RandomChoice([v2.RandomGrayscale(1.0), v2.RandomSolarize(128, 1.0), RandomBlur()]))
    if change := augmentation.color_jitter:
        steps.append(v2.ColorJitter(change, change, change))
    return steps


class RandomBlur:
    """A Gaussian blur of 0.1 to 2 pixels, as 3-Augment has it; torchvision's is slow and refuses tiny images."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(float(torch.empty(()).uniform_(0.1, 2.0))))
