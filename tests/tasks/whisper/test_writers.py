"""Transcripts in each format."""

import json

from tasks.whisper.segments import Segment, Transcript, Word
from tasks.whisper.writers import FORMATS


def segment(start: float, end: float, text: str, words: list[Word] | None = None) -> Segment:
    return Segment(start, end, text, [1, 2], 0.0, -0.25, 1.5, 0.01, words)


TRANSCRIPT = Transcript(
    "a.wav",
    "en",
    3700.0,
    [
        segment(0.0, 1.5, " Hello\tthere -->", [Word(" Hello", 0.0, 1.0, 0.5)]),
        segment(3661.0, 3662.9996, " 客観 & so"),
    ],
)


def test_text() -> None:
    assert FORMATS["txt"](TRANSCRIPT) == "Hello there -->\n客観 & so\n"


def test_subtitles() -> None:
    assert FORMATS["srt"](TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there ->\n\n2\n01:01:01,000 --> 01:01:03,000\n客観 & so\n\n"
    )
    assert FORMATS["vtt"](TRANSCRIPT) == (
        "WEBVTT\n\n00:00.000 --> 00:01.500\nHello there ->\n\n01:01:01.000 --> 01:01:03.000\n客観 & so\n\n"
    )


def test_table() -> None:
    assert FORMATS["tsv"](TRANSCRIPT) == "start\tend\ttext\n0\t1500\tHello there -->\n3661000\t3663000\t客観 & so\n"


def test_json() -> None:
    content = FORMATS["json"](TRANSCRIPT)
    assert "客観" in content
    data = json.loads(content)
    assert data["text"] == "Hello\tthere --> 客観 & so"
    assert (data["language"], data["duration"]) == ("en", 3700.0)
    assert data["segments"][0]["words"] == [{"word": " Hello", "start": 0.0, "end": 1.0, "probability": 0.5}]
    assert data["segments"][1] == {
        "id": 1, "start": 3661.0, "end": 3663.0, "text": " 客観 & so", "tokens": [1, 2], "temperature": 0.0,
        "avg_logprob": -0.25, "compression_ratio": 1.5, "no_speech_prob": 0.01,
    }  # fmt: skip


def test_nothing_said() -> None:
    empty = Transcript("a.wav", None, 5.0, [])
    assert {name: write(empty) for name, write in FORMATS.items() if name != "json"} == {
        "txt": "", "srt": "", "vtt": "WEBVTT\n\n", "tsv": "start\tend\ttext\n"
    }  # fmt: skip
    assert json.loads(FORMATS["json"](empty))["segments"] == []
