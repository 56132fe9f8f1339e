"""When words are said, against openai-whisper on a tiny random model."""

from typing import Any

import numpy as np
import pytest
import torch

from multimodal.data.audio import LogMel
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import load
from tasks.whisper.segments import Segment
from tasks.whisper.words import add_words, align, warp
from tests.parity.whisper import openai

TEXT = ' "Well," said the (old) man: go forward ten meters! And so on, my friend.'


def test_the_cheapest_path() -> None:
    timing = pytest.importorskip("whisper.timing")
    for shape in ((1, 1), (1, 7), (6, 1), (5, 9), (9, 5), (20, 60)):
        for cost in (np.random.randn(*shape), np.random.randint(0, 3, shape).astype(float)):  # many are equal
            rows, columns = warp(cost)
            expected = timing.dtw_cpu(cost)
            assert rows.tolist() == expected[0].tolist()
            assert columns.tolist() == expected[1].tolist()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = openai(n_mels=80, n_audio_ctx=1500, n_vocab=51865, n_text_ctx=100)
    return theirs, load(theirs).model


@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("text", [TEXT, " a", ""])
def test_words_as_openais(models: tuple[Any, Any], text: str, language: str) -> None:
    timing = pytest.importorskip("whisper.timing")
    from whisper.tokenizer import get_tokenizer

    theirs, ours = models
    names = get_tokenizer(True, num_languages=99, language=language, task="transcribe")
    tokenizer = SpeechTokenizer.from_openai(multilingual=True)
    mel = LogMel()(0.1 * torch.randn(480000))
    tokens = tokenizer.encode(text)
    cut = len(tokens) // 2
    parts = [tokens[:cut], tokens[cut:]]
    with torch.no_grad():
        audio = ours.encode(mel[None])[0]
    words = align(
        ours,
        tokenizer,
        audio,
        tokens,
        prompt=tokenizer.prompt(language, timestamps=False),
        language=language,
        length=500,
    )
    expected = timing.find_alignment(theirs, names, tokens, mel, 1000)
    assert [(one.text, one.tokens) for one in words] == [(one.word, one.tokens) for one in expected]
    for one, other in zip(words, expected, strict=True):
        assert (one.start, one.end) == pytest.approx((other.start, other.end))
        assert one.probability == pytest.approx(other.probability, rel=1e-3)

    begin, middle, end = 3.0, 8.0, 12.0
    segments = [
        Segment(a, b, "", part, 0.0, 0.0, 1.0, 0.0)
        for a, b, part in ((begin, middle, parts[0]), (middle, end, parts[1]))
    ]
    dictionaries = [
        {"seek": 300, "start": a, "end": b, "tokens": part}
        for a, b, part in ((begin, middle, parts[0]), (middle, end, parts[1]))
    ]
    add_words(segments, words, [len(part) for part in parts], offset=3.0, last_speech=1.0)
    timing.add_word_timestamps(
        segments=dictionaries, model=theirs, tokenizer=names, mel=mel, num_frames=1000, last_speech_timestamp=1.0
    )
    for segment, other in zip(segments, dictionaries, strict=True):
        assert (segment.start, segment.end) == pytest.approx((other["start"], other["end"]))
        found = [(word.text, word.start, word.end) for word in segment.words or ()]
        assert found == [(w["word"], pytest.approx(w["start"]), pytest.approx(w["end"])) for w in other["words"]]
