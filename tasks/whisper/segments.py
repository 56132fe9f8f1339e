"""What a transcript consists of."""

from dataclasses import dataclass, field


@dataclass
class Word:
    """A word with the punctuation that belongs to it, in seconds from the beginning of the sound."""

    text: str
    start: float
    end: float
    probability: float


@dataclass
class Segment:
    """A piece of speech, in seconds from the beginning of the sound."""

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)
    temperature: float
    mean_log_prob: float
    compression_ratio: float
    no_speech: float
    words: list[Word] | None = None
    """None unless they are asked for."""


@dataclass
class Transcript:
    """What is said in a sound."""

    name: str
    """Of the sound."""
    language: str | None
    """None for a model that knows but one."""
    seconds: float
    """Of the whole sound."""
    segments: list[Segment]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()
