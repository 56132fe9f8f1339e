"""Random changes of recordings in training, drawn from torch's generator.

N samples, C mel channels, T frames
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate


@dataclass(frozen=True, kw_only=True)
class SpeechAugment:
    """SpecAugment ("SpecAugment: A Simple Data Augmentation Method…", Park et al. 2019), and speed.

    Args:
        channel_masks: Bands of mel channels that are hidden.
        channel_width: Most channels of such a band.
        time_masks: Stretches of time that are hidden.
        time_width: Most of such a stretch, as a share of the recording.
        speed: Most by which a recording is played faster or slower, its pitch with it, as a share (Ko et al. 2015).
    """

    channel_masks: int = 0
    channel_width: int = 8
    time_masks: int = 0
    time_width: float = 0.05
    speed: float = 0.0

    def __post_init__(self) -> None:
        for name, right, expected in (
            ("channel_masks", self.channel_masks >= 0, "at least 0"),
            ("channel_width", self.channel_width >= 1, "at least 1"),
            ("time_masks", self.time_masks >= 0, "at least 0"),
            ("time_width", 0 < self.time_width < 1, "a share between 0 and 1"),
            ("speed", 0 <= self.speed < 1, "a share from 0 to below 1"),
        ):
            if not right:
                raise ValueError(f"data.augment.{name} is {getattr(self, name)}, expected {expected}")

    def play(self, samples: Tensor, longest: int) -> Tensor:
        """Samples [N] at another speed, never more than `longest` of them."""
        if not self.speed or len(samples) < 2:
            return samples
        factor = 1 + self.speed * (2 * float(torch.rand(())) - 1)
        length = min(max(1, round(len(samples) / factor)), longest)
        return interpolate(samples[None, None], size=length, mode="linear", align_corners=True)[0, 0]

    def hide(self, mel: Tensor) -> Tensor:
        """A spectrogram [C, T] of which parts are its mean."""
        if not self.channel_masks and not self.time_masks:
            return mel
        mel, mean = mel.clone(), mel.mean()
        for _ in range(self.channel_masks):
            start, end = _stretch(mel.shape[0], self.channel_width)
            mel[start:end] = mean
        for _ in range(self.time_masks):
            start, end = _stretch(mel.shape[1], int(self.time_width * mel.shape[1]))
            mel[:, start:end] = mean
        return mel


def _stretch(length: int, most: int) -> tuple[int, int]:
    """A random part of so many, up to `most` long."""
    width = int(torch.randint(min(most, length) + 1, ()))
    start = int(torch.randint(length - width + 1, ()))
    return start, start + width
