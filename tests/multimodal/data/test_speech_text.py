"""Tokenizers against OpenAI's, and characters alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from multimodal.data.speech_text import SpeechTokenizer

TEXTS = (
    " And so my fellow Americans, ask not what your country can do for you.",
    "it's 10,000 €… don't!  two  spaces\tand\ttabs\nlines",
    " 客観的実在の判断的知識が整理するのである。",
    " مرحبا بالعالم",
    " Бедняга. Ребят",
    "😀 naïve café <|endoftext|> [MUSIC] ♪♪ (laughs)",
    "",
    " ",
)


@pytest.fixture(scope="module", params=["english", "99 languages", "100 languages"])
def pair(request: pytest.FixtureRequest) -> tuple[SpeechTokenizer, Any]:
    """Ours and OpenAI's."""
    whisper = pytest.importorskip("whisper.tokenizer")
    multilingual, number = request.param != "english", 100 if "100" in request.param else 99
    theirs = whisper.get_tokenizer(multilingual, num_languages=number, language="de", task="translate")
    return SpeechTokenizer.from_openai(multilingual=multilingual, num_languages=number), theirs


def test_openais_tokens(pair: tuple[SpeechTokenizer, Any]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text, disallowed_special=())
        assert ours.decode([*tokens, ours.end, ours.timestamps + 3]) == text
    assert ours.decode(ours.encode("😀")[:1]) == theirs.decode(theirs.encode("😀")[:1]) == "\ufffd"
    assert (ours.end, ours.start, ours.no_speech) == (theirs.eot, theirs.sot, theirs.no_speech)
    assert (ours.previous, ours.no_timestamps, ours.timestamps) == (
        theirs.sot_prev, theirs.no_timestamps, theirs.timestamp_begin
    )  # fmt: skip
    assert tuple(ours.not_spoken) == theirs.non_speech_tokens
    assert ours.blank == theirs.encode(" ")
    assert ours.vocab_size == theirs.encoding.n_vocab
    codes = dict(zip(theirs.all_language_codes, theirs.all_language_tokens, strict=True))
    assert ours.languages == codes


def test_openais_prompts(pair: tuple[SpeechTokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.prompt("de", task="translate") == list(theirs.sot_sequence)
    assert ours.prompt("de", task="translate", timestamps=False) == list(theirs.sot_sequence_including_notimestamps)
    if ours.multilingual:
        with pytest.raises(ValueError, match=r"^language 'xx', expected one of en, zh, de, "):
            ours.prompt("xx")


@pytest.mark.parametrize("language", ["en", "ja"])
def test_openais_words(pair: tuple[SpeechTokenizer, Any], language: str) -> None:
    ours, theirs = pair
    theirs.language = language
    for text in TEXTS:
        tokens = [*ours.encode(text), ours.end]
        words, of_words = theirs.split_to_word_tokens(tokens)
        assert ours.words(tokens, language) == list(zip(words, of_words, strict=True))


def test_a_record_is_plain_data(pair: tuple[SpeechTokenizer, Any], tmp_path: Path) -> None:
    ours, _ = pair
    record = json.loads(json.dumps(ours.to_dict()))
    again = SpeechTokenizer.from_record(record)
    (tmp_path / "tokenizer.json").write_text(json.dumps(record["tokenizer"]))
    from_file = SpeechTokenizer.from_file(tmp_path / "tokenizer.json", multilingual=ours.multilingual)
    named = SpeechTokenizer.from_record({"multilingual": ours.multilingual, "num_languages": len(ours.languages)})
    for other in (again, from_file, named):
        assert other.multilingual == ours.multilingual
        assert [other.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_characters() -> None:
    tokenizer = SpeechTokenizer.from_characters("SOS HELP.", num_timestamps=3)
    tokens = tokenizer.encode("HELP SOS.")
    assert len(tokens) == 9
    assert tokenizer.decode([*tokens, tokenizer.end]) == "HELP SOS."
    assert not tokenizer.multilingual
    assert tokenizer.prompt() == [tokenizer.start]
    assert tokenizer.vocab_size == 8 + 2 + 6 + 3  # characters, end and start, the other special ones, times
    assert tokenizer.tokenizer.id_to_token(tokenizer.timestamps + 2) == "<|0.04|>"
    assert SpeechTokenizer.from_record(tokenizer.to_dict()).encode("SOS") == tokenizer.encode("SOS")
    with pytest.raises(ValueError, match=r"^character 'x' is not among those of the tokenizer$"):
        tokenizer.encode("SOx")


def test_characters_of_several_languages() -> None:
    tokenizer = SpeechTokenizer.from_characters("ab", languages=("en", "de"))
    assert tokenizer.languages == {"en": tokenizer.start + 1, "de": tokenizer.start + 2}
    assert tokenizer.prompt("de") == [tokenizer.start, tokenizer.start + 2, tokenizer.transcribe]


def test_faults_are_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    plain = json.loads(Tokenizer.from_str(SpeechTokenizer.from_characters("ab").tokenizer.to_str()).to_str())
    plain["added_tokens"] = []
    cases = [
        (lambda: SpeechTokenizer.from_record(None), "tokenizer record None: expected multilingual and tokenizer"),
        (lambda: SpeechTokenizer.from_record({"kind": 1}), "expected multilingual and tokenizer"),
        (
            lambda: SpeechTokenizer.from_record({"multilingual": False, "tokenizer": {}}),
            "expected a tokenizer.json",
        ),
        (
            lambda: SpeechTokenizer.from_record({"multilingual": False, "tokenizer": plain}),
            "the tokenizer has no token <|endoftext|>, expected one of a Whisper",
        ),
        (lambda: SpeechTokenizer.from_file(tmp_path / "tokenizer.json", multilingual=False), "expected Whisper's"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=r".") as caught:
            make()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
