"""Whole transcriptions against openai-whisper on random weights: windows, previous text, word times."""

from typing import Any

import pytest
import torch

from multimodal.data.audio import LogMel, Sound
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import load
from tasks.whisper.decode import Decoder, DecodingOptions
from tasks.whisper.segments import Transcript
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions
from tests.parity.whisper import openai

SECONDS = 75.0


@pytest.mark.parametrize("words", [False, True], ids=["segments", "words"])
@pytest.mark.parametrize("seed", [0, 1])  # with which openai-whisper comes to an end
def test_as_openais(seed: int, words: bool) -> None:
    pytest.importorskip("whisper")
    torch.manual_seed(seed)
    theirs = openai(n_vocab=51865, n_mels=80, n_audio_ctx=1500, n_text_ctx=40, n_text_layer=2)
    with torch.no_grad():
        theirs.decoder.token_embedding.weight.mul_(3)  # as sure of itself as a trained one
        theirs.decoder.token_embedding.weight[50364:] *= 1.3  # and fond of times
    samples = torch.randn(round(SECONDS * 16000)) * torch.linspace(0.01, 0.3, round(SECONDS * 16000))
    options: dict[str, Any] = {"language": None, "temperature": 0.0, "fp16": False}
    expected = theirs.transcribe(samples, word_timestamps=words, initial_prompt="names", **options)
    tokenizer = SpeechTokenizer.from_openai(multilingual=True)
    decoder = Decoder(load(theirs).model, tokenizer, DecodingOptions(temperatures=(0.0,)))  # type: ignore[arg-type]
    transcriber = Transcriber(decoder, LogMel(), WindowOptions(words=words, initial_prompt="names"))
    ((_, found),) = transcriber.run([lambda: Sound.of(samples, 16000)])
    assert isinstance(found, Transcript)
    assert found.language == expected["language"]
    said = [one for one in expected["segments"] if one["text"].strip() and one["start"] < SECONDS]
    assert len(said) > 2
    assert [one.text for one in found.segments] == [one["text"] for one in said]
    for one, other in zip(found.segments, said, strict=True):
        assert one.tokens == other["tokens"]
        assert one.start == pytest.approx(other["start"], abs=1e-6)
        assert one.end == pytest.approx(min(other["end"], SECONDS), abs=1e-6)
        assert one.mean_log_prob == pytest.approx(other["avg_logprob"], abs=1e-4)
        if words:
            spans = [(word["word"], min(word["start"], SECONDS), min(word["end"], SECONDS)) for word in other["words"]]
            assert [(word.text, word.start, word.end) for word in one.words or ()] == [
                (text, pytest.approx(start, abs=1e-6), pytest.approx(end, abs=1e-6)) for text, start, end in spans
            ]
