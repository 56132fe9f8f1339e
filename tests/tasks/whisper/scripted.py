"""A decoder that says what the test tells it to, and a tiny model with a tokenizer of characters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models.whisper import TINY, Whisper, WhisperConfig
from tasks.whisper.decode import Decoded, Decoder, DecodingOptions
from tests.parity.keys import randomize

ALPHABET = "abcdefgh ."


def tokenizer(*, languages: Sequence[str] = (), num_timestamps: int = 1501) -> SpeechTokenizer:
    return SpeechTokenizer.from_characters(ALPHABET, languages=languages, num_timestamps=num_timestamps)


def tiny_model(of: SpeechTokenizer, **changes: Any) -> Whisper:
    """With windows of thirty seconds, and random weights."""
    stack = replace(TINY, embed_dim=16, depth=2, num_heads=2)
    fields = {"num_mels": 8, "text_context": 60, "vocab_size": of.vocab_size, "encoder": stack, "decoder": stack}
    model = Whisper(WhisperConfig(**(fields | changes)))
    randomize(model)
    return model


class Scripted(Decoder):
    """Says one thing after another; notes what it was asked.

    Args:
        says: for each window the tokens, or all of `Decoded`; the last one again and again.
        options: of decoding.
    """

    def __init__(
        self,
        says: Sequence[list[int] | dict[str, Any]],
        options: DecodingOptions | None = None,
        of: SpeechTokenizer | None = None,
    ) -> None:
        of = of or tokenizer()
        super().__init__(tiny_model(of), of, options or DecodingOptions())
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []

    def decode(
        self, audio: Tensor, languages: Sequence[str | None], previous: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[Decoded]:
        found = []
        for row in range(len(audio)):
            says = self.says.pop(0) if len(self.says) > 1 else self.says[0]
            fields = says if isinstance(says, dict) else {"tokens": says}
            asked = {"language": languages[row], "previous": list(previous[row]), "seed": seeds[row]}
            self.asked.append(asked)
            found.append(decoded(self.tokenizer, audio=audio[row], **fields))
        return found


def decoded(of: SpeechTokenizer, tokens: list[int], audio: Tensor | None = None, **changes: Any) -> Decoded:
    fields = {"mean_log_prob": -0.2, "no_speech": 0.0, "temperature": 0.0, "compression_ratio": 1.0}
    text = of.decode(tokens).strip()
    return Decoded(tokens=tokens, text=text, audio=torch.zeros(1, 1) if audio is None else audio, **(fields | changes))


def spell(of: SpeechTokenizer) -> Callable[..., list[int]]:
    """`say(0.0, "abc", 1.5, …)`: numbers are timestamps, strings text."""

    def say(*parts: float | str) -> list[int]:
        tokens: list[int] = []
        for part in parts:
            tokens += of.encode(part) if isinstance(part, str) else [of.timestamps + round(part / 0.02)]
        return tokens

    return say
