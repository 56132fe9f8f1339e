"""How a CLIP is fed."""

import torch

from multimodal.models.clip import CLIPConfig
from tasks.registry import Example


def example(config: CLIPConfig, batch_size: int) -> Example:
    """Normalised images [B, C, H, W] of noise and as many texts [B, context_length] of random tokens, ended anywhere.

    There may be another number of texts than of images. Answers are the features of both, [B, embed_dim], and what
    makes logits of them: the scale, a scalar, and the bias, where the model has one.
    """
    vision, text = config.vision, config.text
    images = torch.randn(batch_size, vision.in_channels, *vision.image_hw)
    tokens = torch.randint(1, text.end_token, (batch_size, text.context_length))
    ends = torch.randint(1, text.context_length, (batch_size,))
    tokens[torch.arange(batch_size), ends] = text.end_token
    outputs = ("image_features", "text_features", "logit_scale") + ("logit_bias",) * (config.logit_bias is not None)
    return Example({"image": images, "tokens": tokens}, outputs, {"tokens": {0: ("texts", 1)}})
