"""Random changes that training makes to images."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torchvision.transforms import v2

from multimodal.data.image import ImagePreprocess, Resize, ToTensor, Transform


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What training does to an image before the network sees it; what is None is off, or left to the data's default.

    Args:
        crop_scale: Least and greatest share of the area that a random crop keeps; 1 and 1 cut out the centre, as
            evaluation does.
        crop_ratio: Least and greatest width / height of that crop; 3/4 and 4/3 where it is None.
        horizontal_flip: Probability of a mirrored image.
        rotation: Greatest angle in degrees, either way.
        translation: Greatest shift as a share of the side, in each direction.
        zoom: Greatest change of scale, either way, as a share.
    """

    crop_scale: tuple[float, float] | None = None
    crop_ratio: tuple[float, float] | None = None
    horizontal_flip: float | None = None
    rotation: float | None = None
    translation: float | None = None
    zoom: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            span = getattr(self, name)
            if span is not None and not 0 < span[0] <= span[1] <= limit:
                raise ValueError(f"{name} is {list(span)}, expected 0 < least <= greatest <= {limit:g}")
        for name, limit in (("horizontal_flip", 1.0), ("rotation", 180.0), ("translation", 1.0), ("zoom", 0.99)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= limit:
                raise ValueError(f"{name} is {value}, expected a number from 0 to {limit:g}")

    def over(self, default: "Augmentation") -> "Augmentation":
        """This one, with what it leaves None taken from `default`."""
        return Augmentation(**{**asdict(default), **{name: x for name, x in asdict(self).items() if x is not None}})


def train_transform(preprocess: ImagePreprocess, augmentation: Augmentation) -> Transform:
    """As `eval_transform`, with random changes drawn from torch's CPU generator (see `multimodal.data.seeded`)."""
    mode = v2.InterpolationMode(preprocess.interpolation)
    steps: list[Callable[[Any], Any]] = []
    if augmentation.crop_scale in (None, (1.0, 1.0)):
        steps += [Resize(preprocess), v2.CenterCrop(preprocess.size)]
    else:
        ratio = augmentation.crop_ratio or (3 / 4, 4 / 3)
        steps.append(v2.RandomResizedCrop(preprocess.size, augmentation.crop_scale, ratio, interpolation=mode))
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
    return v2.Compose([*steps, ToTensor(preprocess)])
