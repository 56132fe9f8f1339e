"""Morse code as sound, drawn from a seed and an index: nothing comes from outside, and nothing repeats.

N samples, E edges of the keyed tone
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_TABLE = (
    "A.- B-... C-.-. D-.. E. F..-. G--. H.... I.. J.--- K-.- L.-.. M-- N-. O--- P.--. Q--.- R.-. S... T- U..- V...- "
    "W.-- X-..- Y-.-- Z--.. 0----- 1.---- 2..--- 3...-- 4....- 5..... 6-.... 7--... 8---.. 9----."
)
CODE = {entry[0]: entry[1:] for entry in _TABLE.split()}
"""Dots and dashes of each character (ITU-R M.1677-1)."""
CHARACTERS = (5, 40)
"""Least and greatest length of a text, its spaces included."""
WORDS = (2, 8)
"""Least and greatest length of a word."""
WORDS_PER_MINUTE = (12.0, 30.0)
FREQUENCIES = (400.0, 900.0)
"""Hertz of the tone."""
SNRS = (-5.0, 20.0)
"""Decibels of the tone, where it does not fade, over the noise in a band of 2 kHz."""
LOWEST_RATE = 2000
"""Samples a second that carry the highest tone, drift included."""
_BAND = 2000.0
_DRIFT = 10.0
"""Hertz by which a tone wanders to either side."""
_FADE = 0.5
"""Largest share of the amplitude that fading takes away."""
_SPEED = 0.1
"""Share by which the speed changes up to the end of a text."""
_JITTER = 0.05
"""Standard deviation of the length of a dot, dash or gap, as a share of it."""
_RAMP = 0.005
"""Seconds in which the tone rises and falls, against clicks."""

Kind = Callable[[str], bool]
"""Which words a text may have."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A text, and how it is sent. All that is random comes from `key`."""

    text: str
    words_per_minute: float
    frequency: float
    snr: float
    key: tuple[int, int] = field(repr=False)

    @cached_property
    def edges(self) -> NDArray[np.float64]:
        """When the tone begins, ends, begins again, …, in seconds [E]; speed and lengths are not quite even."""
        units = np.array(_units(self.text), dtype=np.float64)
        rng = np.random.default_rng((*self.key, 1))
        pace = 1 + rng.uniform(-_SPEED, _SPEED) * np.linspace(0, 1, len(units))
        lengths = units * (1.2 / self.words_per_minute) * pace * (1 + _JITTER * rng.standard_normal(len(units)))
        before = rng.uniform(0.1, 0.4)
        return before + np.concatenate([[0.0], np.cumsum(np.maximum(lengths, 2 * _RAMP))])

    @cached_property
    def seconds(self) -> float:
        """From the beginning to a while behind the last tone."""
        return float(self.edges[-1]) + 0.2

    def sound(self, rate: int) -> Tensor:
        """Samples, float32 [N] about -1 … 1; ValueError for a rate that cannot carry the tone."""
        if rate < LOWEST_RATE:
            raise ValueError(f"sample_rate is {rate}, expected at least {LOWEST_RATE} for Morse code")
        rng = np.random.default_rng((*self.key, 2))
        times = np.arange(int(self.seconds * rate)) / rate
        brief = times.astype(np.float32)  # in which cosines take far less time
        corners = (self.edges[:, None] + np.array([-0.5, 0.5]) * _RAMP).ravel()
        levels = np.resize([0.0, 1.0, 1.0, 0.0], len(corners))
        depth, (slow, wander) = rng.uniform(0, _FADE), rng.uniform(2, 8, 2).tolist()
        begin, at = rng.uniform(0, 2 * math.pi, 2).tolist()
        fading = 1 - depth * (0.5 + 0.5 * np.cos(2 * math.pi / slow * brief + begin))
        drift = rng.uniform(0, _DRIFT) * wander * np.cos(2 * math.pi / wander * brief + at)  # of the phase
        turns = self.frequency * times
        phase = (2 * math.pi * (turns - np.floor(turns))).astype(np.float32) - drift
        tone = np.interp(times, corners, levels) * fading * np.sin(phase)
        noise = rng.standard_normal(len(times), dtype=np.float32)
        noise *= math.sqrt(0.5 * rate / 2 / _BAND) * 10 ** (-self.snr / 20)
        gain = 0.1 * 10 ** rng.uniform(-0.5, 0.5)
        return torch.from_numpy((gain * (tone + noise)).astype(np.float32))


def draw_message(seed: int, index: int, kind: Kind = lambda word: True, *, practice: bool = False) -> Message:
    """The message of that seed and index.

    Args:
        seed, index: what decides all of it.
        kind: true for words that it may have; a single character is no word.
        practice: to learn from: nine of ten texts have one to eight characters, and half of the messages are in the
            louder quarter of the noise.
    """
    rng = np.random.default_rng((seed, index))
    shortest, longest = CHARACTERS
    if practice and rng.random() < 0.9:
        shortest, longest = 1, WORDS[1]
    length = int(rng.integers(shortest, longest + 1))
    low, high = SNRS
    return Message(
        text=_draw_text(rng, length, kind),
        words_per_minute=float(rng.uniform(*WORDS_PER_MINUTE)),
        frequency=float(rng.uniform(*FREQUENCIES)),
        snr=low + (high - low) * rng.random() ** (2 if practice else 1),
        key=(seed, index),
    )


def share_of(word: str) -> float:
    """A number from 0 to 1 that is the same for a word wherever it is drawn: by it splits have words of their own."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") / 2**32


def _draw_text(rng: Any, left: int, kind: Kind) -> str:
    """So many characters: words of random ones, in which there is nothing to guess, and spaces."""
    words: list[str] = []
    if left == 1:  # which is no word, and of any kind
        return _draw_word(rng, 1, lambda word: True)
    while left > 0:
        # What remains is nothing, or a space and a word.
        lengths = [n for n in range(WORDS[0], min(WORDS[1], left) + 1) if left - n not in range(1, WORDS[0] + 1)]
        words.append(_draw_word(rng, lengths[int(rng.integers(len(lengths)))], kind))
        left -= len(words[-1]) + 1
    return " ".join(words)


def _draw_word(rng: Any, length: int, kind: Kind) -> str:
    letters = list(CODE)
    while True:
        word = "".join(letters[at] for at in rng.integers(len(letters), size=length))
        if kind(word):
            return word


def _units(text: str) -> list[float]:
    """Lengths of tone, silence, tone, … of a text, in dots; the last is a tone."""
    lengths: list[float] = []
    for word in text.split(" "):
        for character in word:
            for sign in CODE[character]:
                lengths += [1.0 if sign == "." else 3.0, 1.0]
            lengths[-1] = 3.0
        lengths[-1] = 7.0
    return lengths[:-1]
