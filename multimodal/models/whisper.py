"""Whisper ("Robust Speech Recognition via Large-Scale Weak Supervision", Radford et al. 2022).

B batch, C mel channels, T frames of the spectrogram, A = ceil(T / stem_stride) audio tokens, N text tokens,
D embed_dim, V vocab_size
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.attention import StackCache
from multimodal.blocks import AudioStem, LearnedPosition, Stack, StackConfig, sinusoid
from multimodal.blocks.block import Selection
from multimodal.ctc import CTCPrefix
from multimodal.linear import PackedWeight

LAYERS: dict[str, Any] = {"key_bias": False, "norm_eps": 1e-5, "init": "whisper"}
"""What the published encoder and decoder layers of all sizes have in common."""
TINY = StackConfig(**LAYERS, embed_dim=384, depth=4, num_heads=6)


@dataclass(frozen=True, kw_only=True)
class WhisperConfig:
    """A Whisper. As it stands it is the published multilingual tiny."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"alignment_heads", "ctc_weight"})

    num_mels: int = 80
    """Channels of the log-mel spectrogram; large-v3 and turbo have 128."""
    audio_context: int = 1500
    """Most audio tokens: 30 seconds. Shorter audio is taken as it is."""
    text_context: int = 448
    """Most text tokens, the prompt's included."""
    vocab_size: int = 51865
    """Text and special tokens: 51864 for English alone, 51865 or 51866 for many languages."""
    stem_kernels: tuple[int, int] = (3, 3)
    """Frames that the two convolutions before the encoder see; from scratch, wide ones learn far sooner."""
    stem_stride: int = 2
    """Frames of the spectrogram that an audio token stands for."""
    mask_padding: bool = False
    """Whether audio is computed at its own length, and padding in a batch attended to by none; the published models
    were trained on audio padded to `audio_context`, and want it so."""
    ctc_weight: float = 0.0
    """What the encoder says by itself, by connectionist temporal classification, as a share of the loss and of the
    scores that texts are decoded by; the published models have none of it."""
    encoder: StackConfig = TINY
    """The encoder's layers."""
    decoder: StackConfig = TINY
    """The decoder's layers."""
    alignment_heads: tuple[tuple[int, int], ...] | None = None
    """The heads of cross-attention, as (layer, head), that tell when a word is said; None = the upper half of all."""

    def __post_init__(self) -> None:
        for name in ("num_mels", "audio_context", "text_context", "vocab_size", "stem_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if any(kernel < 1 or kernel % 2 == 0 for kernel in self.stem_kernels):
            raise ValueError(f"stem_kernels is {self.stem_kernels}, expected odd numbers")
        if not 0 <= self.ctc_weight < 1:
            raise ValueError(f"ctc_weight is {self.ctc_weight}, expected a share in [0, 1)")
        widths = self.encoder.embed_dim, self.decoder.embed_dim
        if self.ctc_weight and widths[0] != widths[1]:
            raise ValueError(
                f"ctc_weight is {self.ctc_weight}, but encoder and decoder are {widths} wide: expected one width"
            )
        if self.encoder.embed_dim % 2:
            raise ValueError(f"encoder.embed_dim is {self.encoder.embed_dim}, expected an even number")
        for layer, head in self.alignment_heads or ():
            if not (0 <= layer < self.decoder.depth and 0 <= head < self.decoder.num_heads):
                raise ValueError(
                    f"alignment_heads has ({layer}, {head}), expected a layer below {self.decoder.depth} "
                    f"and a head below {self.decoder.num_heads}"
                )

    @property
    def frames(self) -> int:
        """Most frames of a spectrogram."""
        return self.stem_stride * self.audio_context

    @property
    def aligned(self) -> tuple[tuple[int, int], ...]:
        """`alignment_heads`, or the heads that stand for them."""
        if self.alignment_heads is not None:
            return self.alignment_heads
        layers = range(self.decoder.depth // 2, self.decoder.depth)
        return tuple((layer, head) for layer in layers for head in range(self.decoder.num_heads))


class WhisperOutput(NamedTuple):
    """What there is to train."""

    logits: Tensor
    """[B, N, V] of each next token."""
    heard: Tensor
    """[B, A, V]: each audio token against the embedding of the tokens, for a loss on the encoder alone."""


class WhisperCache(StackCache):
    """The caches of the decoder, for rows whose prompts may differ in length.

    Args:
        stack: the decoder's own.
        padding: int64 [B], how many tokens at the beginning of each row are padding; None = none.
    """

    def __init__(self, stack: StackCache, padding: Tensor | None) -> None:
        super().__init__(stack.blocks)
        self.padding = padding
        self.audio_mask: Tensor | None = None
        """Which audio tokens are sound, bool [B, A]; None = all."""
        self.heard: CTCPrefix | None = None
        """What the encoder says by itself, where it has a share."""

    def reorder(self, index: Tensor, *, context: bool = True) -> None:
        """See `StackCache.reorder`."""
        super().reorder(index, context=context)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, index)
        if self.heard is not None:
            self.heard.reorder(index)
        if context and self.audio_mask is not None:
            self.audio_mask = self.audio_mask.index_select(0, index)

    def reset(self) -> None:
        """Forget tokens, context and padding."""
        super().reset()
        self.padding = self.audio_mask = self.heard = None


class Whisper(nn.Module):
    """Log-mel spectrograms and the text so far to the next token."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        width, dim = config.encoder.embed_dim, config.decoder.embed_dim
        self.stem = AudioStem(config.num_mels, width, config.stem_kernels, config.stem_stride)
        # A sinusoid that published files store, some of them rounded: so it is loaded like a weight.
        self.audio_positions: Tensor
        self.register_buffer("audio_positions", sinusoid(config.audio_context, width, "whisper"))
        self.encoder = Stack(config.encoder)
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = LearnedPosition(config.text_context, dim)
        self.decoder = Stack(config.decoder, causal=True, context_dim=width)
        self.step_head = PackedWeight()
        nn.init.normal_(self.embed.weight, std=0.02)

    @overload
    def forward(self, mel: Tensor, tokens: Tensor, audio_mask: Tensor | None = None) -> Tensor: ...

    @overload
    def forward(
        self, mel: Tensor, tokens: Tensor, audio_mask: Tensor | None = None, *, need_heard: Literal[True]
    ) -> WhisperOutput: ...

    def forward(
        self, mel: Tensor, tokens: Tensor, audio_mask: Tensor | None = None, *, need_heard: bool = False
    ) -> Tensor | WhisperOutput:
        """Spectrograms and tokens to what follows.

        Args:
            mel: [B, C, T].
            tokens: int64 [B, N].
            audio_mask: bool [B, A], see `encode`.
            need_heard: return what each audio token says by itself as well; the stacks have one width then.

        Returns:
            The logits [B, N, V] of each next token.
        """
        audio = self.encode(mel, audio_mask)
        logits = self.decode(tokens, audio, audio_mask=audio_mask)
        return WhisperOutput(logits, self.hear(audio)) if need_heard else logits

    def encode(self, mel: Tensor, audio_mask: Tensor | None = None) -> Tensor:
        """Log-mel spectrograms [B, C, T] to audio tokens [B, A, D]; ValueError where they are too long.

        Args:
            mel: zeros where it is padding.
            audio_mask: bool [B, A], False where a token is padding, from a multiple of `stem_stride` frames on: what
                the others are does then not depend on how much of it there is. None = all are sound.
        """
        config = self.config
        if mel.dim() != 3 or mel.shape[1] != config.num_mels or mel.shape[2] > config.frames:
            expected = f"[B, {config.num_mels}, at most {config.frames}]"
            raise ValueError(f"spectrograms have shape {list(mel.shape)}, expected {expected}")
        valid = None
        if audio_mask is not None:
            valid = audio_mask.repeat_interleave(config.stem_stride, dim=1)[:, : mel.shape[2]]
        x = self.stem(mel, valid)
        return self.encoder(x + self.audio_positions[: x.shape[1]].to(x.dtype), key_mask=audio_mask).last

    def hear(self, audio: Tensor) -> Tensor:
        """What each audio token says by itself, of one width with the decoder: [B, A, D] to logits [B, A, V]."""
        return F.linear(audio, self.embed.weight)

    def make_cache(self, length: int | None = None, *, padding: Tensor | None = None) -> WhisperCache:
        """An empty cache for decoding step by step.

        Args:
            length: tokens that fit, the padding included; None = `text_context`.
            padding: int64 [B], how many tokens at the beginning of each row are padding; None = none.
        """
        return WhisperCache(self.decoder.make_cache(length or self.config.text_context), padding)

    def decode(
        self,
        tokens: Tensor,
        audio: Tensor | None = None,
        *,
        audio_mask: Tensor | None = None,
        cache: WhisperCache | None = None,
        only: Selection | None = None,
    ) -> Tensor:
        """Text tokens to the logits of each next one.

        Args:
            tokens: int64 [B, N]; with a cache, those that follow the cached ones.
            audio: from `encode`, [B, A, D]; may be None once the cache holds its keys and values.
            audio_mask: bool [B, A], False where audio is padding; None = nowhere, or as the cache has it.
            cache: from `make_cache`.
            only: the tokens whose logits are wanted: a slice of positions, or positions per row, int64 [B, M].

        Returns:
            [B, N, V], or as many of N as are wanted.
        """
        x, key_mask = self._embed(tokens, cache)
        if cache is not None:
            if audio is not None:
                cache.audio_mask = audio_mask
            audio_mask = cache.audio_mask
        h = self.decoder(x, audio, key_mask=key_mask, context_key_mask=audio_mask, cache=cache, only=only).last
        if cache is None and not torch.is_grad_enabled():  # of many tokens at once
            return F.linear(h, self.embed.weight)
        return self.step_head(h, self.embed.weight)

    def begin(self, logits: Tensor, audio: Tensor, cache: WhisperCache, *, blank: int) -> Tensor:
        """The scores [B, V] of the first token of a text, to be followed by `step`.

        Args:
            logits: [B, V], the decoder's behind the prompt.
            audio: what it was decoded with, [B, A, D].
            cache: that holds the prompt.
            blank: the token that ends a text.
        """
        if self.config.ctc_weight:
            cache.heard = CTCPrefix(self.hear(audio), blank, cache.audio_mask)
        return self._joint(logits, cache)

    def step(self, tokens: Tensor, cache: WhisperCache) -> Tensor:
        """The scores [B, V] of what follows these tokens, int64 [B, 1], of which the cache holds all that came before:
        logits, or where the encoder has a share the mean of both log-probabilities, weighted by `ctc_weight`.
        """
        if cache.heard is not None:
            cache.heard.append(tokens[:, 0])
        return self._joint(self.decode(tokens, cache=cache)[:, -1], cache)

    def _joint(self, logits: Tensor, cache: WhisperCache) -> Tensor:
        if cache.heard is None:
            return logits
        return torch.lerp(logits.float().log_softmax(-1), cache.heard.scores(), self.config.ctc_weight)

    def _embed(self, tokens: Tensor, cache: WhisperCache | None) -> tuple[Tensor, Tensor | None]:
        """Embedded tokens [B, N, D], and which keys are no padding, bool [B, Nk], where any are."""
        offset, count = 0 if cache is None else cache.length, tokens.shape[1]
        x = self.embed(tokens)
        if cache is None or cache.padding is None:
            return x + self.position(count, offset), None
        index = torch.arange(offset + count, device=tokens.device)
        place = index[offset:] - cache.padding[:, None]
        return x + self.position.weight[place.clamp(min=0)], index >= cache.padding[:, None]

    def cross_weights(self, tokens: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [B, N, V], and the cross-attention [B, heads, N, A] of the heads that tell when a word is said."""
        x, _ = self._embed(tokens, None)
        heads = self.config.aligned
        layers = sorted({layer for layer, _ in heads})
        out = self.decoder(x, audio, need_weights=layers)
        weights = dict(zip(layers, out.cross_weights, strict=True))
        return F.linear(out.last, self.embed.weight), torch.stack([weights[at][:, head] for at, head in heads], dim=1)
