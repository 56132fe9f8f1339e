"""What the CLIPs of open_clip and of Hugging Face share: one architecture under two sets of names."""

from typing import Any

from multimodal.models.clip import CLIPConfig, TextConfig
from multimodal.pretrained.record import plain_stack, require

OPENAI_MEAN = [0.48145466, 0.4578275, 0.40821073]
OPENAI_STD = [0.26862954, 0.26130258, 0.27577711]
_BPE_TOKENS, _BPE_END = 49408, 49407

# What the published code cannot be told, and so has to be as it is there.
_VISION: dict[str, tuple[Any, ...]] = {
    "class_token": (True,),
    "num_registers": (0,),
    "position": ("learned",),
    "prefix_position": (True,),
    "patch_bias": (False,),
    "conv_stem": (False,),
    "patch_norm": (False,),
}


def require_published(config: CLIPConfig, where: str, **allowed: tuple[Any, ...]) -> None:
    """ValueError unless the model is a CLIP as published; `allowed` are more fields, as for `require`."""
    fixed = {f"vision.{name}": values for name, values in _VISION.items()}
    for side in ("vision", "text"):
        fixed |= plain_stack(getattr(config, side), f"{side}.", norm_order=("pre",), final_norm=(True,))
    require(config, fixed | allowed, where)


def tokenizer_of(text: TextConfig) -> dict[str, Any] | None:
    """The description of CLIP's own tokenizer, where the text tower has its vocabulary; None = it is not known."""
    if (text.vocab_size, text.end_token) != (_BPE_TOKENS, _BPE_END):
        return None
    return {"kind": "clip_bpe", "context_length": text.context_length}


def square(size: tuple[int, int]) -> int | list[int]:
    """One number for a square, else (height, width)."""
    height, width = size
    return height if height == width else [height, width]
