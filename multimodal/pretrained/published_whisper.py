"""What OpenAI's and Hugging Face's Whisper have in common: one architecture under two sets of names."""

from pathlib import Path
from typing import Any

from multimodal.models.whisper import WhisperConfig
from multimodal.pretrained.files import read_json
from multimodal.pretrained.record import plain_stack, require

TOKENIZER = "tokenizer.json"
SAMPLE_RATE, FFT_SIZE, HOP_LENGTH = 16000, 400, 160
"""Of every published Whisper."""

# What the published code cannot be told, and so has to be as it is there.
_STACK: dict[str, tuple[Any, ...]] = {
    "norm_order": ("pre",),
    "norm_eps": (1e-5,),
    "final_norm": (True,),
    "key_bias": (False,),
    "layer_scale": (None,),
}


def require_published(config: WhisperConfig, where: str, **allowed: tuple[Any, ...]) -> None:
    """ValueError unless the model is a Whisper as published; `allowed` are more fields, as for `require`."""
    stacks: dict[str, tuple[Any, ...]] = {}
    for side in ("encoder", "decoder"):
        stacks |= plain_stack(getattr(config, side), f"{side}.", **_STACK)
    fixed: dict[str, tuple[Any, ...]] = {
        "decoder.embed_dim": (config.encoder.embed_dim,),
        "stem_kernels": ((3, 3),),
        "stem_stride": (2,),
        "mask_padding": (False,),
    }
    require(config, stacks | fixed | allowed, where)


def preprocess(num_mels: int) -> dict[str, Any]:
    """The spectrogram that published weights were trained on, as `multimodal.data.audio.LogMel` has it."""
    return {
        "num_mels": num_mels,
        "sample_rate": SAMPLE_RATE,
        "fft_size": FFT_SIZE,
        "hop_length": HOP_LENGTH,
        "mean": 0.0,
        "std": 1.0,
    }


def is_multilingual(vocab_size: int) -> bool:
    """Whether a published vocabulary is that of many languages, by its size as in OpenAI's code."""
    return vocab_size >= 51865


def read_tokenizer(folder: Path, *, multilingual: bool) -> dict[str, Any] | None:
    """The tokenizer that lies beside weights, as a checkpoint holds it; None where there is none, or none of a Whisper.

    The record is that of `multimodal.data.speech_text.SpeechTokenizer`, which checks it.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    data = read_json(path)
    names = {token.get("content") for token in data.get("added_tokens", []) if isinstance(token, dict)}
    return {"multilingual": multilingual, "tokenizer": data} if "<|startoftranscript|>" in names else None
