"""Convolutional backbones: images to one map of features.

B batch, C channels, (H, W) image size, (h, w) size of the feature map
"""

from copy import deepcopy
from typing import Any

import torch
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn

from multimodal.blocks.convolution import ConvNorm, ResidualConv
from multimodal.blocks.frozen_norm import fold_norms


class TimmBackbone(nn.Module):
    """A feature map of a timm model, with its batch norms frozen as in DETR (section A.4 of its paper).

    Args:
        name: a model of timm that gives features, such as resnet50.
        stage: which of its feature maps, counted from the end: -1 = the coarsest.
        dilation: the last stage dilated instead of strided (DC5), which doubles the resolution of the map.

    Raises:
        ValueError: timm has no such model, or it gives no features, not that map, not of images of any size, or cannot
            be dilated.
    """

    def __init__(self, name: str, *, stage: int = -1, dilation: bool = False) -> None:
        super().__init__()
        import timm

        options: dict[str, Any] = {"output_stride": 16} if dilation else {}
        try:
            net = timm.create_model(name, features_only=True, out_indices=(stage,), **options)
        except IndexError as error:
            raise ValueError(f"backbone_stage is {stage}, but backbone {name!r} has fewer feature maps") from error
        except (RuntimeError, TypeError, NotImplementedError, AssertionError, AttributeError, OSError) as error:
            dilated = ", dilated," if dilation else ""
            raise ValueError(
                f"backbone {name!r}{dilated} is not to be had from timm: {str(error) or type(error).__name__}"
            ) from error
        self.name = name
        self.net: nn.Module = freeze_batch_norm_2d(net)
        info: Any = net.feature_info
        self.channels: int = info.channels()[-1]
        self._check_map()
        fold_norms(self.net, 3)
        # As the maps are: otherwise each backward pass reorders the weights.
        self.net.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, channels, h, w]."""
        # The order that oneDNN computes in: otherwise the maps are reordered around every convolution.
        features: list[Tensor] = self.net(images.contiguous(memory_format=torch.channels_last))
        return features[0]

    def _check_map(self) -> None:
        """ValueError unless an image of any size becomes a map; many a Transformer has one size."""
        trial = deepcopy(self.net).to("meta")  # a copy without values, whose forward pass costs nothing
        try:
            shape = trial(torch.zeros(1, 3, 333, 417, device="meta"))[0].shape
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"backbone {self.name!r} does not take images of any size: {error}") from error
        if len(shape) != 4 or shape[1] != self.channels:
            raise ValueError(
                f"backbone {self.name!r} gives features {list(shape)}, expected [1, {self.channels}, h, w]"
            )


class ConvStem(nn.Module):
    """A small residual network at an eighth of the image's resolution, for small images learned from scratch.

    Groups are normed rather than batches, so that an image's features do not depend on the others.

    Args:
        channels: of the map; a multiple of 32.
    """

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.channels = channels
        widths = [channels // 4, channels // 2, channels]
        self.stem = ConvNorm(3, widths[0], stride=2)
        self.stages = nn.Sequential(
            ConvNorm(widths[0], widths[1], stride=2),
            ResidualConv(widths[1]),
            ConvNorm(widths[1], widths[2], stride=2),
            ResidualConv(widths[2]),
            ResidualConv(widths[2]),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to features [B, channels, ⌈H/8⌉, ⌈W/8⌉]."""
        return self.stages(self.stem(images))


def build_backbone(name: str, *, stage: int = -1, dilation: bool = False) -> TimmBackbone | ConvStem:
    """`conv` for a `ConvStem`, or the name of a timm model."""
    if name != "conv":
        return TimmBackbone(name, stage=stage, dilation=dilation)
    if dilation or stage != -1:
        raise ValueError(
            f"backbone 'conv' has one feature map: dilation {dilation}, stage {stage}, expected false and -1"
        )
    return ConvStem()
