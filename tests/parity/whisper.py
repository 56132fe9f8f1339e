"""Tiny random Whispers, OpenAI's, Hugging Face's and ours, for the comparisons of several files."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from multimodal.models.whisper import TINY, Whisper, WhisperConfig
from tests.parity.keys import randomize

DIMS: dict[str, int] = {
    "n_mels": 8,
    "n_audio_ctx": 20,
    "n_audio_state": 32,
    "n_audio_head": 4,
    "n_audio_layer": 2,
    "n_vocab": 60,
    "n_text_ctx": 16,
    "n_text_state": 32,
    "n_text_head": 4,
    "n_text_layer": 3,
}
"""Of OpenAI's, with other numbers of layers on both sides, as turbo has them."""
HF: dict[str, Any] = {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "vocab_size": 60,
    "max_target_positions": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "pad_token_id": 50,
    "bos_token_id": 50,
    "eos_token_id": 50,
    "decoder_start_token_id": 51,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}


def openai(**dims: int) -> Any:
    """A `whisper.model.Whisper`, no weight of which is a special number such as 0 or 1."""
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(**(DIMS | dims)))
    nn.init.normal_(model.decoder.positional_embedding)  # it comes uninitialised
    return randomize(model)


def hugging_face(**options: Any) -> Any:
    """A `WhisperForConditionalGeneration`, no weight of which is a special number."""
    import transformers

    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(HF | options)))
    return randomize(model)


def tiny(**changes: Any) -> Whisper:
    """Ours; `encoder` and `decoder` are changes of these."""
    stack = replace(TINY, embed_dim=32, num_heads=4, depth=2)
    sides = {side: replace(stack, **changes.pop(side, {})) for side in ("encoder", "decoder")}
    fields = {"num_mels": 8, "audio_context": 20, "text_context": 16, "vocab_size": 60}
    model = Whisper(WhisperConfig(**(fields | sides | changes)))
    randomize(model)
    return model


def inputs(num_mels: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Spectrograms [2, C, 40] and tokens [2, 9]."""
    return torch.randn(2, num_mels, 40), torch.randint(60, (2, 9))
