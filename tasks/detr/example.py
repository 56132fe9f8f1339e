"""How a DETR is fed."""

import torch

from multimodal.models.detr import DETRConfig
from tasks.registry import Example

LEAST = 64
"""Pixels of the shorter side of an image that leave more than one place in the map of every backbone."""


def example(config: DETRConfig, batch_size: int) -> Example:
    """Normalised images [B, 3, H, W] of noise, of another size for each batch size; logits [B, Q, C], boxes [B, Q, 4].

    Height and width are free, from `LEAST` on. There is no mask of valid pixels among the inputs: what a DETR
    finds is the image's own only where nothing is padded, and so images of one size run together.
    """
    images = torch.randn(batch_size, 3, 96 + 16 * batch_size, 128 + 8 * batch_size)
    return Example({"image": images}, ("logits", "boxes"), {"image": {2: ("height", LEAST), 3: ("width", LEAST)}})
