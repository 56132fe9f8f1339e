"""CLIP ("Learning Transferable Visual Models From Natural Language Supervision", Radford et al. 2021).

B batch, C channels, (H, W) image size, N tokens of a text, D embed_dim of a tower, E embed_dim of the joint space
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from multimodal.blocks import LearnedPosition, Stack, StackConfig
from multimodal.blocks.init import InitScheme, init_linear
from multimodal.models.vit import ViT, ViTConfig

MAX_LOGIT_SCALE = math.log(100)
"""Largest natural logarithm of the scale of the logits (section 2.5); the smallest is 0."""
_VISION_PREFIX = "vision."


@dataclass(frozen=True, kw_only=True)
class TextConfig(StackConfig):
    """A text tower: the fields of its stack, which is causal, and what is around it."""

    embed_dim: int = 512
    """Width of the tokens."""
    num_heads: int = 8
    """Attention heads."""
    init: InitScheme = "clip"
    """Family whose initialisation is used."""
    context_length: int = 77
    """Most tokens of a text, with those that begin and end it."""
    vocab_size: int = 49408
    """Number of tokens that there are."""
    end_token: int = 49407
    """The token that ends a text, and at whose first occurrence the text is read off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("context_length", self.context_length >= 2, "at least 2")
        self._expect("vocab_size", self.vocab_size >= 1, "at least 1")
        self._expect(
            "end_token", 0 < self.end_token < self.vocab_size, f"in 1 … vocab_size - 1 = {self.vocab_size - 1}"
        )


VISION = ViTConfig(
    embed_dim=768,
    num_heads=12,
    norm_eps=1e-5,
    init="clip_vision",
    patch_size=32,
    num_classes=0,
    patch_bias=False,
    pre_norm=True,
)
"""The image tower of ViT-B/32."""
TEXT = TextConfig()
"""The text tower of ViT-B/32."""


@dataclass(frozen=True, kw_only=True)
class CLIPConfig:
    """A CLIP. As it stands it is ViT-B/32 with the exact GELU; OpenAI's weights have `quick_gelu` in both towers."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"logit_scale"})

    embed_dim: int = 512
    """Width of the space that images and texts share."""
    vision: ViTConfig = VISION
    """The image tower, without a head."""
    text: TextConfig = TEXT
    """The text tower."""
    logit_scale: float = math.log(1 / 0.07)
    """Initial natural logarithm of the scale of the logits, in 0 … ln 100."""
    logit_bias: float | None = None
    """Initial bias of the logits (SigLIP's is -10); None = there is none."""

    def __post_init__(self) -> None:
        if self.embed_dim < 1:
            raise ValueError(f"embed_dim is {self.embed_dim}, expected at least 1")
        if not 0 <= self.logit_scale <= MAX_LOGIT_SCALE:
            raise ValueError(f"logit_scale is {self.logit_scale}, expected 0 … ln 100 = {MAX_LOGIT_SCALE:.4f}")
        if self.vision.num_classes:
            raise ValueError(
                f"vision.num_classes is {self.vision.num_classes}, expected 0: the image tower has no head"
            )
        if self.vision.distilled:
            raise ValueError("vision.distilled is True, expected false: an image has one feature")


class CLIPOutput(NamedTuple):
    """What the losses need: logits are `logit_scale · image_features · text_featuresᵀ + logit_bias`."""

    image_features: Tensor
    """[B, E], of length 1."""
    text_features: Tensor
    """[B, E], of length 1."""
    logit_scale: Tensor
    """Scalar in 1 … 100."""
    logit_bias: Tensor | None
    """Scalar; None where the model has none."""


class TextTower(nn.Module):
    """A causal Transformer over the tokens of a text, read off at its end token (section 2.4)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embed = nn.Embedding(config.vocab_size, config.embed_dim)
        nn.init.normal_(self.token_embed.weight, std=0.02)
        self.position = LearnedPosition(config.context_length, config.embed_dim, std=0.01)
        self.encoder = Stack(config, causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Features [B, D] of texts, int64 [B, N].

        What follows the end token changes nothing, so that a batch may end with its longest text.

        Raises:
            ValueError: more than `context_length` tokens, or, where to look costs nothing, a text without end token.
        """
        config = self.config
        if tokens.dim() != 2 or tokens.shape[1] > config.context_length:
            raise ValueError(f"tokens have shape {list(tokens.shape)}, expected [B, at most {config.context_length}]")
        is_end = tokens == config.end_token
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and not is_end.any(dim=1).all():
            row = int(is_end.any(dim=1).int().argmin())
            raise ValueError(f"tokens: row {row} has no end token {config.end_token}")
        end = is_end.int().argmax(dim=1)  # the first of equal ones
        x = self.token_embed(tokens) + self.position(tokens.shape[1])
        return self.encoder(x, only=end[:, None]).last[:, 0]


class CLIP(nn.Module):
    """Images and texts to directions in one space, where those that belong together are near each other."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.config = config
        self.vision = ViT(config.vision)
        self.text = TextTower(config.text)
        self.vision_proj = nn.Linear(config.vision.embed_dim, config.embed_dim, bias=False)
        self.text_proj = nn.Linear(config.text.embed_dim, config.embed_dim, bias=False)
        for projection in (self.vision_proj, self.text_proj):
            init_linear(projection, projection.in_features**-0.5)
        # One number each, in a dimension of its own: FSDP2 divides no scalars.
        self.logit_scale = nn.Parameter(torch.full((1,), config.logit_scale))
        self.logit_bias = None if config.logit_bias is None else nn.Parameter(torch.full((1,), config.logit_bias))

    def encode_image(self, images: Tensor, *, normalize: bool = True) -> Tensor:
        """Images [B, C, H, W] to features [B, E], of length 1 unless `normalize` is False."""
        features = self.vision_proj(self.vision(images))
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, tokens: Tensor, *, normalize: bool = True) -> Tensor:
        """Texts, int64 [B, N], to features [B, E], of length 1 unless `normalize` is False; see `TextTower`."""
        features = self.text_proj(self.text(tokens))
        return F.normalize(features, dim=-1) if normalize else features

    def forward(self, images: Tensor, tokens: Tensor, *, micro_batch: int | None = None) -> CLIPOutput:
        """Features of images and texts, and what makes logits of them.

        Args:
            images: [B, C, H, W].
            tokens: int64 [B, N].
            micro_batch: images or texts that go through a tower at a time, and again in the backward pass, where
                alone the activations of so many are held: the features and gradients are those of the whole batch.
        """
        scale = self.logit_scale[0]
        # The limited value with the gradient of the free one: clamped, a scale at its limit could never leave it.
        limited = scale.detach().clamp(0.0, MAX_LOGIT_SCALE) + (scale - scale.detach())
        return CLIPOutput(
            _in_chunks(self.encode_image, images, micro_batch),
            _in_chunks(self.encode_text, tokens, micro_batch),
            limited.exp(),
            None if self.logit_bias is None else self.logit_bias[0],
        )

    @torch.no_grad()
    def limit_logit_scale(self) -> None:
        """Bring the scale back into its range, after an optimizer's step: it would drift on beyond it."""
        self.logit_scale.clamp_(0, MAX_LOGIT_SCALE)

    def adapt_state_dict(self, state: dict[str, Tensor], source: CLIPConfig) -> dict[str, Tensor]:
        """Another model's weights with the image tower's positions resampled to this model's grid.

        Args:
            state: state dict of a model built from `source`.
            source: its config.
        """
        vision = {k.removeprefix(_VISION_PREFIX): v for k, v in state.items() if k.startswith(_VISION_PREFIX)}
        adapted = self.vision.adapt_state_dict(vision, source.vision)
        return {**state, **{f"{_VISION_PREFIX}{key}": value for key, value in adapted.items()}}

    def no_weight_decay(self) -> set[str]:
        """Parameters besides norms and biases that take no weight decay."""
        return {f"{_VISION_PREFIX}{name}" for name in self.vision.no_weight_decay()} | {"text.position.weight"}


def _in_chunks(encode: Callable[[Tensor], Tensor], inputs: Tensor, size: int | None) -> Tensor:
    """What `encode` makes of the inputs [B, ...], so many at a time; its output alone is kept for the gradient."""
    if size is None or len(inputs) <= size or not torch.is_grad_enabled():
        return encode(inputs)
    return torch.cat([checkpoint(encode, part, use_reentrant=False) for part in inputs.split(size)])
