"""How a Vision Transformer is fed."""

import torch

from multimodal.models.vit import ViTConfig
from tasks.registry import Example


def example(config: ViTConfig, batch_size: int) -> Example:
    """Normalised images [B, C, H, W] of noise; logits [B, num_classes], or features [B, D] of a model without head."""
    images = torch.randn(batch_size, config.in_channels, *config.image_hw)
    return Example({"image": images}, ("logits" if config.num_classes else "features",))
