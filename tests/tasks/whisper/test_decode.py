"""Decoding of windows against openai-whisper on random weights, and what a batch and a fallback may not change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import load
from tasks.whisper.decode import Decoder, DecodingOptions
from tests.parity.whisper import openai
from tests.tasks.whisper.scripted import Scripted, decoded, tiny_model, tokenizer

KINDS = {"english": (51864, 80, 99), "many": (51865, 80, 99), "large-v3": (51866, 128, 100)}
"""Vocabulary, mel channels and languages of the published models."""


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Decoder, Tensor]:
    """OpenAI's model, our decoder of the same weights, and spectrograms."""
    vocab, mels, languages = KINDS[request.param]
    torch.manual_seed(1)
    theirs = openai(n_vocab=vocab, n_mels=mels, n_audio_ctx=1500, n_text_ctx=40, n_text_layer=1)
    with torch.no_grad():
        theirs.decoder.token_embedding.weight.mul_(3)  # as sure of itself as a trained one
    tokenizer = SpeechTokenizer.from_openai(multilingual=vocab > 51864, num_languages=languages)
    mel = torch.randn(3, mels, 3000)
    return theirs, Decoder(load(theirs).model, tokenizer, DecodingOptions()), mel  # type: ignore[arg-type]


def with_options(decoder: Decoder, **options: Any) -> Decoder:
    return Decoder(decoder.model, decoder.tokenizer, DecodingOptions(temperatures=(0.0,), **options))


PREVIOUS = [[], [400, 500, 600], list(range(300, 340))]


@pytest.mark.parametrize("beam_size", [None, 3])
@pytest.mark.parametrize("timestamps", [True, False])
def test_as_openais(pair: tuple[Any, Decoder, Tensor], beam_size: int | None, timestamps: bool) -> None:
    whisper = pytest.importorskip("whisper")
    theirs, decoder, mel = pair
    many = decoder.tokenizer.multilingual
    ours = with_options(decoder, beam_size=beam_size, timestamps=timestamps, translate=many)
    found = ours.decode(ours.encode(mel), ["de" if many else None] * 3, PREVIOUS, [0, 0, 0])
    for one, previous, window in zip(found, PREVIOUS, mel, strict=True):
        options = whisper.DecodingOptions(
            language="de" if many else "en",
            task="translate" if many else "transcribe",
            beam_size=beam_size,
            prompt=previous,
            without_timestamps=not timestamps,
            fp16=False,
        )
        expected = whisper.decode(theirs, window, options)
        assert one.tokens == expected.tokens
        assert one.mean_log_prob == pytest.approx(expected.avg_logprob, abs=1e-4)
        assert one.no_speech == pytest.approx(expected.no_speech_prob, abs=1e-6)
        if timestamps:  # without them, OpenAI's text has the special tokens that weights like these say
            assert one.text == expected.text
            assert one.compression_ratio == pytest.approx(expected.compression_ratio)


def test_languages_as_openais(pair: tuple[Any, Decoder, Tensor]) -> None:
    theirs, decoder, mel = pair
    if not decoder.tokenizer.multilingual:
        return
    _, expected = theirs.detect_language(mel)
    for language, shares in zip(decoder.languages(decoder.encode(mel)), expected, strict=True):
        assert language.code == max(shares, key=shares.get)
        assert language.probability == pytest.approx(max(shares.values()), abs=1e-6)


def test_drawn_text_does_not_depend_on_the_batch() -> None:
    of = tokenizer()
    options = DecodingOptions(temperatures=(0.0, 0.8), log_prob_threshold=0.0, best_of=3)  # nothing is good enough
    decoder = Decoder(tiny_model(of), of, options)
    audio = decoder.encode(torch.randn(3, 8, 3000))
    previous = [[], [1, 2], [3]]
    together = decoder.decode(audio, [None] * 3, previous, [5, 6, 7])
    assert {one.temperature for one in together} == {0.8}
    for row, one in enumerate(together):
        (alone,) = decoder.decode(audio[row : row + 1], [None], previous[row : row + 1], [5 + row])
        assert alone.tokens == one.tokens
    again = decoder.decode(audio, [None] * 3, previous, [8, 9, 10])
    assert [one.tokens for one in again] != [one.tokens for one in together]


@pytest.mark.parametrize(
    ("options", "changes", "bad"),
    [
        ({}, {}, False),
        ({}, {"mean_log_prob": -1.2}, True),
        ({}, {"mean_log_prob": -1.2, "no_speech": 0.7}, False),
        ({}, {"compression_ratio": 2.5}, True),
        ({}, {"compression_ratio": 2.5, "no_speech": 0.7}, True),
        ({}, {"compression_ratio": 2.5, "no_speech": 0.7, "mean_log_prob": -1.2}, False),
        ({"no_speech_threshold": None}, {"mean_log_prob": -1.2, "no_speech": 0.7}, True),
        ({"log_prob_threshold": None}, {"mean_log_prob": -9.0}, False),
        ({"compression_threshold": None}, {"compression_ratio": 9.0}, False),
    ],
)
def test_when_another_temperature_is_tried(options: dict[str, Any], changes: dict[str, Any], bad: bool) -> None:
    assert DecodingOptions(**options).is_bad(decoded(tokenizer(), [1], **changes)) == bad


@pytest.mark.parametrize(
    ("no_speech", "log_prob", "silent"), [(0.5, -2.0, False), (0.7, -2.0, True), (0.7, -0.5, False)]
)
def test_when_a_window_is_silent(no_speech: float, log_prob: float, silent: bool) -> None:
    assert DecodingOptions().is_silent(no_speech, log_prob) == silent
    assert DecodingOptions(log_prob_threshold=None).is_silent(no_speech, log_prob) == (no_speech > 0.6)
    assert not DecodingOptions(no_speech_threshold=None).is_silent(no_speech, log_prob)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0, expected at least 1"),
        ({"best_of": 0}, "best_of is 0, expected at least 1"),
        ({"temperatures": ()}, r"temperatures \[\], expected at least one, none below 0"),
        ({"temperatures": (-1.0,)}, r"temperatures \[-1.0\], expected"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DecodingOptions(**options)


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the tokenizer has 1519 tokens, expected at most 12$"):
        Decoder(tiny_model(tokenizer(), vocab_size=12), tokenizer(), DecodingOptions())


def test_a_model_without_times_decodes_without() -> None:
    of = tokenizer(num_timestamps=0)
    assert not Decoder(tiny_model(of), of, DecodingOptions()).timestamps
    assert Scripted([[]]).timestamps
