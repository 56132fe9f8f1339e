"""How a Whisper is fed."""

import torch

from multimodal.models.whisper import WhisperConfig
from tasks.registry import Example


def example(config: WhisperConfig, batch_size: int) -> Example:
    """Spectrograms of noise [B, C, T] and random tokens [B, text_context], to the logits of each next token.

    Both have their full length: what is not there is padded behind, as it was in the training of published models.
    """
    inputs = {
        "mel": torch.randn(batch_size, config.num_mels, config.frames),
        "tokens": torch.randint(config.vocab_size, (batch_size, config.text_context)),
    }
    return Example(inputs, ("logits",))
