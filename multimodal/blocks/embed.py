"""From raw input to tokens.

B batch, C channels, N tokens, D embed_dim, (h, w) grid of patches, (p, q) patch size, T steps or frames
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.convolution import ConvNorm, ResidualConv


class PatchEmbed(nn.Module):
    """Non-overlapping patches, each projected to a token ("An Image is Worth 16x16 Words", section 3.1).

    A Linear over flattened patches equals the strided convolution of other code, weight reshaped; in bf16 it is faster.

    Args:
        patch_size: (height, width) of a patch in pixels.
        in_channels: channels of the image.
        embed_dim: width of a token.
        bias: on the projection.
    """

    def __init__(self, patch_size: tuple[int, int], in_channels: int, embed_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Linear(in_channels * patch_size[0] * patch_size[1], embed_dim, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, h·p, w·q] -> [B, h·w, D], row by row; ValueError where the patch does not divide the image."""
        p, q = self.patch_size
        _check_size(images, self.patch_size)
        patches = images.unflatten(3, (-1, q)).unflatten(2, (-1, p))  # [B, C, h, p, w, q]
        return self.proj(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


class ConvEmbed(nn.Module):
    """Tokens of patches by convolutions ("Early Convolutions Help Transformers See Better", Xiao et al. 2021).

    Each convolution halves the map and doubles its channels, up to the width of a token; a residual block and a
    projection follow.

    Args:
        patch_size: (height, width) of a patch in pixels: equal, and a power of 2.
        in_channels: channels of the image.
        embed_dim: width of a token.
        bias: on the projection.

    Raises:
        ValueError: a patch that halvings do not make, or a width that norms over groups of 16 channels do not divide.
    """

    CHANNELS = 16
    """Of the first map."""

    def __init__(self, patch_size: tuple[int, int], in_channels: int, embed_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        halvings = patch_size[0].bit_length() - 1
        if patch_size[0] != patch_size[1] or patch_size[0] != 2**halvings or not halvings:
            raise ValueError(
                f"conv_stem with patch_size {patch_size[0]} x {patch_size[1]}, expected a square of 2, 4, 8 …"
            )
        if embed_dim % 16:
            raise ValueError(f"conv_stem with embed_dim {embed_dim}, expected a multiple of 16")
        self.patch_size = patch_size
        widths = [in_channels, *(min(embed_dim, self.CHANNELS << at) for at in range(halvings))]
        halved = (ConvNorm(before, width, stride=2) for before, width in pairwise(widths))
        self.convs = nn.Sequential(*halved, ResidualConv(widths[-1]))
        # As the maps are: otherwise each backward pass reorders the weights.
        self.convs.to(memory_format=torch.channels_last)
        self.proj = nn.Linear(widths[-1], embed_dim, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, h·p, w·p] -> [B, h·w, D], row by row; ValueError where the patch does not divide the image."""
        _check_size(images, self.patch_size)
        maps = self.convs(images.contiguous(memory_format=torch.channels_last))
        return self.proj(maps.flatten(2).transpose(1, 2))


def _check_size(images: Tensor, patch_size: tuple[int, int]) -> None:
    height, width = images.shape[-2:]
    p, q = patch_size
    if height % p or width % q:
        raise ValueError(f"image size {height} x {width} is not a multiple of the patch size {p} x {q}")


class AudioStem(nn.Module):
    """Two convolutions over the frames of a spectrogram ("Robust Speech Recognition via Large-Scale Weak Supervision",
    Radford et al. 2022, section 2.2).

    Args:
        num_mels: channels of the spectrogram.
        embed_dim: width of a token.
        kernels: frames that each convolution sees, odd numbers; the published ones see 3.
        stride: frames of a token. Of an even one the second convolution strides over two, the first over the rest.
    """

    def __init__(self, num_mels: int, embed_dim: int, kernels: tuple[int, int] = (3, 3), stride: int = 2) -> None:
        super().__init__()
        first, second = kernels
        self.stride = 1 if stride % 2 else stride // 2
        self.conv1 = nn.Conv1d(num_mels, embed_dim, first, stride=self.stride, padding=first // 2)
        self.conv2 = nn.Conv1d(embed_dim, embed_dim, second, stride=stride // self.stride, padding=second // 2)
        for convolution in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)

    def forward(self, mel: Tensor, valid: Tensor | None = None) -> Tensor:
        """[B, C, T] -> [B, ceil(T / stride), D].

        Frames that are not `valid`, bool [B, T], must be zeros, and stay so between the convolutions.
        """
        x = F.gelu(self.conv1(mel))
        if valid is not None:
            x = x * valid[:, None, :: self.stride]
        return F.gelu(self.conv2(x)).transpose(1, 2)


class ImageEmbed(nn.Module):
    """A whole image as one token, as the Decision Transformer embeds what it sees of Atari.

    The convolutions are those of "Human-level control through deep reinforcement learning" (Mnih et al. 2015).

    Args:
        image_size: (height, width) in pixels, at least 36.
        in_channels: channels of the image.
        embed_dim: width of the token.
    """

    def __init__(self, image_size: tuple[int, int], in_channels: int, embed_dim: int) -> None:
        super().__init__()
        if min(image_size) < 36:
            raise ValueError(f"an image of {image_size[0]} x {image_size[1]} pixels, expected at least 36 x 36")
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(in_channels, 32, 8, stride=4), nn.ReLU()),
            *(nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU()),
        )
        sides = [((side - 4) // 4 - 2) // 2 - 2 for side in image_size]
        self.proj = nn.Linear(64 * sides[0] * sides[1], embed_dim)

    def forward(self, images: Tensor) -> Tensor:
        """[B, T, C, H, W] -> [B, T, D], between -1 and 1."""
        features = self.convolutions(images.flatten(0, 1)).flatten(1)
        return self.proj(features).tanh().unflatten(0, images.shape[:2])
