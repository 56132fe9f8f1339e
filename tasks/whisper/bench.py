"""What the benchmark measures of Whisper."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multimodal.data.audio import LogMel
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.generate import generate
from multimodal.models.whisper import TINY, Whisper, WhisperCache, WhisperConfig
from tasks.whisper.data import IGNORED
from tasks.whisper.rules import Suppress
from tasks.whisper.samples import ALPHABET
from tasks.workload import (
    Data,
    Setting,
    Subject,
    Workload,
    compiled,
    default_recipe,
    model_for,
    training,
)

MANY = 8
"""Recordings that are decoded at once."""
TRAIN, TEXT = 4, 64
PROMPT, END = (50258, 50259, 50359, 50363), 50257
"""Of the multilingual models: start, English, transcribe, no timestamps; and what ends a text."""
_UNITS = "seconds of audio"


def workloads(size: str) -> list[Workload]:
    """The spectrogram, the encoder, greedy decoding of a fixed number of tokens (of base as well), a training step."""
    if size == "tiny":
        vocabulary = SpeechTokenizer.from_characters(ALPHABET).vocab_size
        config, options = default_recipe("whisper", vocab_size=vocabulary)
        mel = LogMel(sample_rate=2000, num_mels=8, fft_size=64, hop_length=40)  # as the recipe has it
        return _Works("Whisper, default recipe", config, mel, prompt=(1,), end=0, tokens=20).all(options)
    tiny = _Works("Whisper tiny", WhisperConfig(), LogMel(), prompt=PROMPT, end=END, tokens=100)
    layers = replace(TINY, embed_dim=512, depth=6, num_heads=8)
    config = WhisperConfig(encoder=layers, decoder=layers)
    base = _Works("Whisper base", config, LogMel(), prompt=PROMPT, end=END, tokens=100)
    return [*tiny.all({}), base.decoding(1)]


class _Works:
    """The works of a model; see `workloads`."""

    def __init__(
        self, model: str, config: WhisperConfig, mel: LogMel, *, prompt: tuple[int, ...], end: int, tokens: int
    ) -> None:
        self.model, self.config, self.mel = model, config, mel
        self.prompt, self.end, self.tokens = prompt, end, tokens
        self.frames = config.frames
        self.seconds = self.frames / mel.frames_per_second

    def all(self, options: dict[str, Any]) -> list[Workload]:
        def train(setting: Setting, data: Data) -> Subject:
            return training("whisper", self.config, setting, data, **options)

        length = min(TEXT, self.config.text_context)
        return [
            self._work("log-mel", 1, self._sound, self._spectrogram, only_float32=True, compiles=False),
            self._work(
                "encoder", 1, lambda: self._mel(1), self._encode, reads=lambda whisper: [whisper.stem, whisper.encoder]
            ),
            self.decoding(1),
            self.decoding(MANY),
            Workload(
                model=self.model,
                name=f"train, {length} tokens",
                batch=TRAIN,
                data=lambda: self._lesson(length),
                ours=train,
                config=self.config,
                trains=True,
                unit="recordings",
            ),
        ]

    def _work(self, name: str, batch: int, data: Any, ours: Any, **more: Any) -> Workload:
        given: dict[str, Any] = {
            "unit": _UNITS,
            "items": batch * self.seconds,
            "audio_seconds": batch * self.seconds,
        } | more
        return Workload(model=self.model, name=name, batch=batch, data=data, ours=ours, config=self.config, **given)

    def decoding(self, batch: int) -> Workload:
        """From the spectrogram to so many tokens, all greedy."""
        facts = {"prompt": self.prompt, "end": self.end, "tokens": self.tokens}
        more = {
            "unit": "tokens",
            "items": batch * self.tokens,
            "facts": facts,
            "reads": lambda whisper: [whisper.embed, whisper.decoder],  # the table is the output head as well
            "steps": self.tokens,
            "compiles": False,
        }
        return self._work(f"decode {self.tokens} tokens", batch, lambda: self._mel(batch), self._decode, **more)

    def _sound(self) -> Data:
        return {"samples": 0.1 * torch.randn(round(self.seconds * self.mel.sample_rate))}

    def _mel(self, batch: int) -> Data:
        return {"mel": torch.randn(batch, self.config.num_mels, self.frames).clamp(-1, 1)}

    def _lesson(self, length: int) -> Data:
        tokens = torch.randint(1, self.config.vocab_size, (TRAIN, length))
        labels = torch.cat([tokens[:, 1:], torch.full((TRAIN, 1), self.end)], dim=1)
        labels[:, : len(self.prompt) - 1] = IGNORED
        audio_length = torch.full((TRAIN,), self.config.audio_context)
        return {**self._mel(TRAIN), "tokens": tokens, "labels": labels, "audio_length": audio_length}

    def _spectrogram(self, setting: Setting, data: Data) -> Subject:
        return Subject(run=lambda: self.mel(data["samples"]), model=None)

    def _encode(self, setting: Setting, data: Data) -> Subject:
        whisper, mel = self._whisper(setting), data["mel"].to(setting.dtype)
        run = compiled(whisper.encode, setting)
        return Subject(run=lambda: run(mel), model=whisper)

    def _decode(self, setting: Setting, data: Data) -> Subject:
        whisper, mel = self._whisper(setting), data["mel"].to(setting.dtype)

        def step(tokens: Tensor, cache: WhisperCache) -> Tensor:
            return whisper.decode(tokens, cache=cache)[:, -1]

        def run() -> list[list[int]]:
            audio = whisper.encode(mel)
            cache = whisper.make_cache(len(self.prompt) + self.tokens)
            prompts = torch.tensor([self.prompt], device=mel.device).expand(len(mel), -1)
            logits = whisper.decode(prompts, audio, cache=cache, only=slice(-1, None))[:, -1]
            limits = torch.full((len(mel),), self.tokens)
            found = generate(step, cache, logits, end=self.end, limits=limits, rules=[Suppress([self.end])])
            return [one.tokens for one in found]

        return Subject(run=run, model=whisper)

    def _whisper(self, setting: Setting) -> Whisper:
        whisper = model_for("whisper", self.config, setting)
        assert isinstance(whisper, Whisper)
        return whisper
