"""Windows of a spectrogram to tokens: prompts, temperature fallback, language detection.

B windows, C mel channels, T frames, A audio tokens, D embed_dim, V vocabulary
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.generate import Generated, beam_search, generate, most_likely
from multimodal.models.whisper import Whisper, WhisperCache
from tasks.whisper.rules import decoding_rules

TOKEN_SECONDS = 0.02
"""Of an audio token, and so of a timestamp."""
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How a window is decoded; the defaults are the published ones (Radford et al. 2022, section 4.5)."""

    translate: bool = False
    """To English, instead of in the language that is spoken."""
    timestamps: bool = True
    """Predict when segments begin and end."""
    beam_size: int | None = None
    """Sequences that are followed at temperature 0; None = the most likely token each time."""
    patience: float = 1.0
    """How long beam search waits for better sequences."""
    best_of: int = 5
    """Sequences that are drawn at other temperatures."""
    length_penalty: float | None = None
    """See `multimodal.generate.most_likely`."""
    temperatures: tuple[float, ...] = TEMPERATURES
    """Tried in this order, until a transcript is taken."""
    compression_threshold: float | None = 2.4
    """A text that compresses better than this repeats itself, and is not taken."""
    log_prob_threshold: float | None = -1.0
    """A text of a mean log-probability below this is not taken."""
    no_speech_threshold: float | None = 0.6
    """Where the text is not probable either, a window of which this is exceeded is silent."""
    suppress: tuple[int, ...] | None = None
    """Tokens that never follow; None = marks that are not spoken."""
    latest_start: float | None = 1.0
    """Seconds into the window until which its first segment has to begin; None = any."""

    def __post_init__(self) -> None:
        for name in ("beam_size", "best_of"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures {list(self.temperatures)}, expected at least one, none below 0")

    def is_silent(self, no_speech: float, mean_log_prob: float) -> bool:
        """Whether a window is taken for silence."""
        if self.no_speech_threshold is None or no_speech <= self.no_speech_threshold:
            return False
        return self.log_prob_threshold is None or mean_log_prob <= self.log_prob_threshold

    def is_bad(self, found: "Decoded") -> bool:
        """Whether another temperature is to be tried."""
        if self.log_prob_threshold is not None and found.mean_log_prob < self.log_prob_threshold:
            # What is improbable since nothing is said does not get better.
            return self.no_speech_threshold is None or found.no_speech <= self.no_speech_threshold
        return self.compression_threshold is not None and found.compression_ratio > self.compression_threshold


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What is said in a window."""

    tokens: list[int]
    text: str
    mean_log_prob: float
    no_speech: float
    """Probability that nothing is said."""
    temperature: float
    compression_ratio: float
    audio: Tensor = field(repr=False)
    """The encoded window [A, D]."""


class Language(NamedTuple):
    """The language that is most likely spoken in a window."""

    code: str
    probability: float
    no_speech: float
    """Probability that nothing is said."""


def compression_ratio(text: str) -> float:
    """Bytes of a text over those of it compressed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


class Decoder:
    """A model, its tokenizer, and how they are used.

    Raises:
        ValueError: the tokenizer has tokens that the model does not know.
    """

    def __init__(self, model: Whisper, tokenizer: SpeechTokenizer, options: DecodingOptions) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        vocabulary = model.config.vocab_size
        if tokenizer.no_timestamps >= vocabulary:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, expected at most {vocabulary}")
        # A model that was trained without times has no tokens for them.
        self.timestamps = options.timestamps and tokenizer.timestamps < vocabulary
        latest = None if options.latest_start is None else round(options.latest_start / TOKEN_SECONDS)
        self.rules = decoding_rules(tokenizer, timestamps=self.timestamps, suppress=options.suppress, latest=latest)
        self.weight = model.embed.weight

    @property
    def prompt_length(self) -> int:
        """Most tokens of previous text."""
        return self.model.config.text_context // 2 - 1

    @torch.inference_mode()
    def encode(self, mel: Tensor) -> Tensor:
        """Spectrograms [B, C, T] on any device to encoded windows [B, A, D]."""
        return self.model.encode(mel.to(self.weight))

    @torch.inference_mode()
    def languages(self, audio: Tensor) -> list[Language]:
        """The language of each encoded window [B, A, D]."""
        start = torch.full((len(audio), 1), self.tokenizer.start, device=audio.device)
        probabilities = self.model.decode(start, audio)[:, 0].float().softmax(-1)
        codes, tokens = zip(*self.tokenizer.languages.items(), strict=True)
        of_languages = probabilities[:, list(tokens)]
        shares = (of_languages / of_languages.sum(-1, keepdim=True)).max(-1)
        silent = probabilities[:, self.tokenizer.no_speech]
        return [
            Language(codes[int(index)], float(share), float(nothing))
            for share, index, nothing in zip(shares.values, shares.indices, silent, strict=True)
        ]

    @torch.inference_mode()
    def decode(
        self, audio: Tensor, languages: Sequence[str | None], previous: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[Decoded]:
        """What is said in each window.

        Args:
            audio: encoded windows [B, A, D].
            languages: of each window.
            previous: tokens of the text before each.
            seeds: for drawing, where temperatures above 0 are tried. A window is then decoded by itself, so that what
                is drawn does not depend on the others.
        """
        found: dict[int, Decoded] = {}
        waiting = list(range(len(audio)))
        for temperature in self.options.temperatures:
            groups = [waiting] if temperature == 0 else [[row] for row in waiting]
            for rows in groups:
                prompts = [self._prompt(languages[row], previous[row]) for row in rows]
                seed = seeds[rows[0]] * 1000 + round(100 * temperature)
                found |= zip(rows, self._attempt(audio[rows], prompts, temperature, seed), strict=True)
            waiting = [row for row in waiting if self.options.is_bad(found[row])]
            if not waiting:
                break
        return [found[row] for row in range(len(audio))]

    def _prompt(self, language: str | None, previous: Sequence[int]) -> list[int]:
        begin = [self.tokenizer.previous, *previous[-self.prompt_length :]] if previous else []
        task = "translate" if self.options.translate else "transcribe"
        return begin + self.tokenizer.prompt(language, task=task, timestamps=self.timestamps)

    def _attempt(self, audio: Tensor, prompts: list[list[int]], temperature: float, seed: int) -> list[Decoded]:
        """All windows at one temperature."""
        options = self.options
        context = self.model.config.text_context
        limits = torch.tensor([min(context // 2, context + 1 - len(prompt)) for prompt in prompts])
        logits, no_speech, cache = self._prefill(audio, prompts, int(limits.max()))
        candidates: list[list[Generated]]
        if temperature == 0 and options.beam_size is not None:
            candidates = beam_search(
                self.model.step,
                cache,
                logits,
                end=self.tokenizer.end,
                limits=limits,
                beam_size=options.beam_size,
                patience=options.patience,
                rules=self.rules,
            )
        else:
            group = 1 if temperature == 0 else options.best_of
            if group > 1:
                index = torch.arange(len(logits), device=logits.device).repeat_interleave(group)
                cache.reorder(index)
                logits, limits = logits[index], limits.repeat_interleave(group)
            generated = generate(
                self.model.step,
                cache,
                logits,
                end=self.tokenizer.end,
                limits=limits,
                temperature=temperature,
                rules=self.rules,
                generator=torch.Generator(logits.device).manual_seed(seed),
            )
            candidates = [generated[at : at + group] for at in range(0, len(generated), group)]
        chosen = [most_likely(some, options.length_penalty) for some in candidates]
        return [
            self._decoded(one, silent, temperature, window)
            for one, silent, window in zip(chosen, no_speech, audio, strict=True)
        ]

    def _prefill(self, audio: Tensor, prompts: list[list[int]], more: int) -> tuple[Tensor, list[float], WhisperCache]:
        """The logits [B, V] that follow each prompt, the probability that nothing is said, and the filled cache."""
        longest = max(map(len, prompts))
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=audio.device)
        rows = [[self.tokenizer.end] * (longest - len(prompt)) + prompt for prompt in prompts]
        tokens = torch.tensor(rows, device=audio.device)
        cache = self.model.make_cache(longest + more, padding=padding if padding.any() else None)
        start = rows[0].index(self.tokenizer.start)  # as far from the end in every row
        both = torch.tensor([[start, longest - 1]], device=audio.device).expand(len(rows), 2)
        logits = self.model.decode(tokens, audio, cache=cache, only=both)
        no_speech = logits[:, 0].float().softmax(-1)[:, self.tokenizer.no_speech]
        return self.model.begin(logits[:, 1], audio, cache, blank=self.tokenizer.end), no_speech.tolist(), cache

    def _decoded(self, one: Generated, no_speech: float, temperature: float, audio: Tensor) -> Decoded:
        text = self.tokenizer.decode(one.tokens).strip()
        return Decoded(
            tokens=one.tokens,
            text=text,
            mean_log_prob=one.mean_log_prob,
            no_speech=no_speech,
            temperature=temperature,
            compression_ratio=compression_ratio(text),
            audio=audio,
        )
