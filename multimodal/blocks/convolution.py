"""Convolutions that are learned from scratch, with norms over groups of channels.

Groups are normed rather than batches, so that an image's features do not depend on the others.

B batch, C channels, (H, W) size of the map
"""

import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.init import init_convolution


class ConvNorm(nn.Module):
    """A 3 × 3 convolution, a norm over groups of 16 channels, and a ReLU."""

    def __init__(self, in_channels: int, channels: int, *, stride: int = 1, activate: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(max(1, channels // 16), channels)
        self.activate = activate
        init_convolution(self.conv)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return F.relu(x) if self.activate else x


class ResidualConv(nn.Module):
    """Two convolutions beside a shortcut ("Deep Residual Learning", He et al. 2016, section 3.3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(channels, channels)
        self.conv2 = ConvNorm(channels, channels, activate=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(self.conv1(x)))
