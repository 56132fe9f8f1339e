"""Tiny random CLIPs, and what is fed to them, for the comparisons of several files."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.models.clip import CLIP, TEXT, VISION, CLIPConfig, CLIPOutput
from tests.parity.keys import assert_close

VOCAB, LENGTH = 60, 9
END = VOCAB - 1


def tiny(**changes: Any) -> CLIP:
    """Ours; `vision` and `text` are changes of these."""
    vision = replace(VISION, embed_dim=32, depth=2, num_heads=2, image_size=16, patch_size=4)
    text = replace(TEXT, embed_dim=24, depth=2, num_heads=2, context_length=LENGTH, vocab_size=VOCAB, end_token=END)
    towers = {name: replace(one, **changes.pop(name, {})) for name, one in (("vision", vision), ("text", text))}
    return CLIP(CLIPConfig(**({"embed_dim": 20} | towers | changes))).eval()


@torch.no_grad()
def randomize(module: nn.Module) -> Any:
    """Weights far enough off their initial values that images and texts come to differ; in eval mode."""
    for name, parameter in module.named_parameters():
        if not name.endswith("logit_scale"):
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5))
    return module.eval()


def batch(end: int = END) -> tuple[Tensor, Tensor]:
    """Images [3, 3, 16, 16], and texts [3, 9] of three lengths; behind the end one is not padding but goes on."""
    tokens = torch.randint(1, end - 1, (3, LENGTH))
    for row, length in zip(tokens, (4, LENGTH, 6), strict=True):
        row[length - 1] = end
        row[length:] = 0
    tokens[2, 7:] = torch.tensor([3, end])
    return torch.randn(3, 3, 16, 16), tokens


def assert_logits(out: CLIPOutput, expected: Tensor) -> None:
    """Equal logits of images (rows) and texts, whose scale is well above 1."""
    logits = out.logit_scale * out.image_features @ out.text_features.T
    assert expected.std() > 0.1
    assert_close(logits if out.logit_bias is None else logits + out.logit_bias, expected)
