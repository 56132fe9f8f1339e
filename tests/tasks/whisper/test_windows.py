"""Windows that move by predicted timestamps, whatever a decoder says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from multimodal.data.audio import LogMel, Sound
from tasks.whisper.decode import DecodingOptions
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions, Windows
from tests.tasks.whisper.scripted import Scripted, decoded, spell, tokenizer

RATE = 16000
MEL = LogMel(num_mels=8)
Say = Callable[..., list[int]]


@pytest.fixture
def say() -> Say:
    return spell(tokenizer())


def sound(seconds: float, name: str = "noise") -> Sound:
    return Sound.of(0.1 * torch.randn(round(seconds * RATE)), RATE, name=name)


def run(decoder: Scripted, seconds: float, **options: Any) -> Windows:
    """All windows of a sound, one after another."""
    windows = Windows(decoder, MEL.read(sound(seconds)), None, WindowOptions(**options))
    for _ in range(100):
        window = windows.next()
        if window is None:
            return windows
        (found,) = decoder.decode(decoder.encode(window.mel[None]), [None], [window.previous], [window.seed])
        windows.take(found)
    raise AssertionError("it does not end")


def spans(windows: Windows) -> list[tuple[float, float, str]]:
    return [(round(one.start, 2), round(one.end, 2), one.text) for one in windows.segments]


def test_the_next_window_begins_at_the_last_pair(say: Say) -> None:
    decoder = Scripted([say(0.0, "ab", 4.0, 4.0, "cd", 9.5, 9.5), say(0.0, "ef", 5.0)])
    windows = run(decoder, 20.0)
    assert spans(windows) == [(0.0, 4.0, "ab"), (4.0, 9.5, "cd"), (9.5, 14.5, "ef")]
    assert [asked["seed"] for asked in decoder.asked] == [0, 950]


def test_what_the_window_cuts_off_is_left_to_the_next(say: Say) -> None:
    decoder = Scripted([say(0.0, "ab", 4.0, 4.0, "cd"), say(0.0, "cd", 5.0)])
    assert spans(run(decoder, 40.0)) == [(0.0, 4.0, "ab"), (4.0, 9.0, "cd"), (34.0, 39.0, "cd")]
    assert [asked["seed"] for asked in decoder.asked] == [0, 400, 3400]


def test_one_timestamp_at_the_end_means_that_nothing_follows(say: Say) -> None:
    decoder = Scripted([say(0.0, "ab", 4.0, 4.0, "cd", 6.0), say(0.0, "ef", 5.0)])
    assert spans(run(decoder, 40.0)) == [(0.0, 4.0, "ab"), (4.0, 6.0, "cd"), (30.0, 35.0, "ef")]


def test_text_without_times_lasts_as_long_as_the_window(say: Say) -> None:
    assert spans(run(Scripted([say("ab")]), 12.34)) == [(0.0, 12.34, "ab")]


def test_no_time_is_beyond_the_sound(say: Say) -> None:
    windows = run(Scripted([say(0.0, "ab", 4.0, 4.0, "cd", 29.0)]), 6.5)
    assert spans(windows) == [(0.0, 4.0, "ab"), (4.0, 6.5, "cd")]
    windows = run(Scripted([say(0.0, "ab", 4.0, 8.0, "cd", 29.0)]), 6.5)
    assert spans(windows) == [(0.0, 4.0, "ab")]


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("parts", [(0.0, 0.0), (0.0,), (0.0, "ab", 0.0, 0.0), ()], ids=str)
def test_it_ends_whatever_is_said(parts: tuple[Any, ...], words: bool, say: Say) -> None:
    decoder = Scripted([say(*parts)])
    run(decoder, 95.0, words=words)
    assert len(decoder.asked) <= (20 if words else 4)


def test_one_sample_past_the_end() -> None:
    for samples in (480_000, 480_001, 480_160):
        decoder = Scripted([[]])
        windows = Windows(decoder, MEL.read(sound(samples / RATE)), None, WindowOptions())
        count = 0
        while windows.next() is not None:
            windows.take(decoded(decoder.tokenizer, []))
            count += 1
        assert count == (2 if samples >= 480_160 else 1)


def test_silence_is_empty_and_asks_nothing() -> None:
    decoder = Scripted([[1]])
    for length in (0, 1, 100, 5 * RATE):
        windows = Windows(decoder, MEL.read(Sound.of(torch.zeros(length), RATE)), None, WindowOptions())
        assert windows.next() is None
        assert windows.transcript().text == ""
        assert windows.frames_done == windows.reader.num_frames
    assert decoder.asked == []


def test_a_window_that_is_taken_for_silence_is_skipped(say: Say) -> None:
    silent = {"tokens": say(0.0, "ab", 4.0, 4.0), "no_speech": 0.9, "mean_log_prob": -1.5}
    decoder = Scripted([silent, say(0.0, "cd", 3.0)])
    assert spans(run(decoder, 40.0)) == [(30.0, 33.0, "cd")]
    likely = silent | {"mean_log_prob": -0.5}
    assert spans(run(Scripted([likely]), 4.0)) == [(0.0, 4.0, "ab")]


def test_previous_text_is_shown(say: Say) -> None:
    first = say(0.0, "ab", 30.0)
    decoder = Scripted([first, say(0.0, "cd", 1.0)])
    run(decoder, 40.0, initial_prompt="gh")
    prompt = decoder.tokenizer.encode(" gh")
    assert [asked["previous"] for asked in decoder.asked] == [prompt, prompt + first]
    decoder = Scripted([first, say(0.0, "cd", 1.0)])
    run(decoder, 40.0, use_previous=False)
    assert [asked["previous"] for asked in decoder.asked] == [[], []]
    decoder = Scripted([{"tokens": first, "temperature": 0.8}, say(0.0, "cd", 1.0)])
    run(decoder, 40.0)
    assert [asked["previous"] for asked in decoder.asked] == [[], []]


def test_a_model_of_texts_alone_is_shown_no_previous_text() -> None:
    decoder = Scripted([[1, 2]], of=tokenizer(num_timestamps=0))
    assert len(run(decoder, 70.0).segments) == 3
    assert [asked["previous"] for asked in decoder.asked] == [[], [], []]
    with pytest.raises(ValueError, match=r"^initial prompt: the model was trained on texts alone, expected one with "):
        Transcriber(decoder, MEL, WindowOptions(initial_prompt="gh"))


def test_parts_of_a_sound(say: Say) -> None:
    decoder = Scripted([say(0.0, "ab", 2.0)])
    windows = Windows(decoder, MEL.read(sound(60.0)), None, WindowOptions(), [(500, 800), (4000, 9000)])
    while windows.next() is not None:
        windows.take(decoded(decoder.tokenizer, say(0.0, "ab", 2.0)))
    assert spans(windows) == [(5.0, 7.0, "ab"), (40.0, 42.0, "ab")]


# ------------------------------------------------------------------------------------------------------------- batches


def test_sounds_of_a_batch_keep_their_own_text(say: Say) -> None:
    decoder = Scripted([say(0.0, text, 30.0) for text in ("a", "b", "c", "a", "b", "d")])
    transcriber = Transcriber(decoder, MEL, WindowOptions(), batch_size=2)
    sounds = [sound(seconds, str(seconds)) for seconds in (40.0, 35.0, 20.0)]
    found = dict(transcriber.run([lambda one=one: one for one in sounds]))  # type: ignore[misc]
    assert {index: result.text for index, result in found.items()} == {0: "ac", 1: "ba", 2: "b"}
    assert [result.name for _, result in sorted(found.items())] == ["40.0", "35.0", "20.0"]


def test_a_bad_sound_leaves_the_others_alone(say: Say) -> None:
    def bad() -> Sound:
        raise ValueError("b.wav: no sound")

    transcriber = Transcriber(Scripted([say(0.0, "a", 1.0)]), MEL, WindowOptions(), batch_size=2)
    done: list[float] = []
    found = dict(transcriber.run([bad, lambda: sound(2.0), bad], lambda now, new: done.append(now)))
    assert [isinstance(found[index], ValueError) for index in range(3)] == [True, False, True]
    assert sum(done) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("of", "options", "language", "message"),
    [
        ((), {}, "de", "language 'de': the model is for one language alone"),
        ((), {"translate": True}, None, "translation: the model is for one language alone"),
        (("en", "de"), {}, "xx", "language 'xx': expected one of en, de"),
    ],
)
def test_a_language_that_the_model_lacks(
    of: tuple[str, ...], options: dict[str, Any], language: str | None, message: str
) -> None:
    decoder = Scripted([[]], DecodingOptions(**options), tokenizer(languages=of))
    with pytest.raises(ValueError, match=f"^{message}"):
        Transcriber(decoder, MEL, WindowOptions(), language=language)


def test_the_language_is_told_over_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.whisper.decode import Language

    decoder = Scripted([[]], None, tokenizer(languages=("en", "de")))
    heard = iter([Language("en", 0.9, 0.95), Language("de", 0.5, 0.1)])
    monkeypatch.setattr(decoder, "languages", lambda audio: [next(heard)])
    intro = torch.zeros(30 * RATE)  # nothing to hear; then noise that is no speech; then speech
    samples = torch.cat([intro, 0.1 * torch.randn(60 * RATE)])
    transcriber = Transcriber(decoder, MEL, WindowOptions())
    ((_, transcript),) = transcriber.run([lambda: Sound.of(samples, RATE)])
    assert transcript.language == "de"
    assert decoder.asked[0]["language"] == "de"
