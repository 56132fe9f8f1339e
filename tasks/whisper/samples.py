"""Sounds with their texts, wherever they come from: recordings in files, or Morse code that is made when asked for.

N samples
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from multimodal.data.audio import load_audio
from multimodal.data.morse import CODE, Message, draw_message, share_of


class Samples(Protocol):
    """Sounds and texts by index."""

    @property
    def texts(self) -> Sequence[str]: ...
    @property
    def seconds(self) -> Sequence[float]: ...
    @property
    def fingerprint(self) -> str:
        """Changes with the samples and their order, though not with the place of their folder."""

    def name(self, index: int) -> str:
        """What errors call it."""

    def sound(self, index: int, rate: int) -> Tensor:
        """Samples, float32 [N], of `rate` a second."""


@dataclass(frozen=True)
class Recording:
    """A file, and what it says."""

    file: str
    name: str
    """As the data have it."""
    text: str
    seconds: float


class Recordings:
    """Files, decoded each time."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.recordings = sorted(recordings, key=lambda one: one.seconds)

    @cached_property
    def texts(self) -> Sequence[str]:
        return [one.text for one in self.recordings]

    @cached_property
    def seconds(self) -> Sequence[float]:
        return [one.seconds for one in self.recordings]

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for one in self.recordings:
            digest.update(f"{one.name}\t{one.text}\n".encode())
        return digest.hexdigest()

    def name(self, index: int) -> str:
        return self.recordings[index].file

    def sound(self, index: int, rate: int) -> Tensor:
        return load_audio(self.recordings[index].file, rate)


SERIES = {"train": 21, "val": 22, "test": 23}
"""Seeds of the messages."""
SHARES = {"train": (0.2, 1.0), "val": (0.1, 0.2), "test": (0.0, 0.1)}
"""Each split has its own words, by their share; see `multimodal.data.morse.share_of`."""
HELD_OUT = {"val": 128, "test": 512}
"""Messages that are measured."""
ALPHABET = " " + "".join(CODE)


class Morse:
    """Messages in Morse code, from the shortest to the longest. Those to train on are oftener short, down to a letter.

    Args:
        split: train, val or test.
        count: messages to train on.
    """

    def __init__(self, split: str, count: int) -> None:
        low, high = SHARES[split]
        drawn = [
            draw_message(SERIES[split], index, lambda word: low <= share_of(word) < high, practice=split == "train")
            for index in range(HELD_OUT.get(split, count))
        ]
        self.messages: list[Message] = sorted(drawn, key=lambda message: message.seconds)

    @cached_property
    def texts(self) -> Sequence[str]:
        return [message.text for message in self.messages]

    @cached_property
    def seconds(self) -> Sequence[float]:
        return [message.seconds for message in self.messages]

    @property
    def fingerprint(self) -> str:
        return f"{len(self.messages)} messages in Morse code"

    def name(self, index: int) -> str:
        return f"message {index}"

    def sound(self, index: int, rate: int) -> Tensor:
        return self.messages[index].sound(rate)
