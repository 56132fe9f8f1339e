"""Morse code: what is drawn is the same each time and within its limits, and can be read off the sound."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from multimodal.data.morse import (
    CHARACTERS,
    CODE,
    FREQUENCIES,
    SNRS,
    WORDS,
    WORDS_PER_MINUTE,
    Message,
    draw_message,
    share_of,
)

RATE = 2000


def test_a_message_is_a_function_of_seed_and_index() -> None:
    first, again = draw_message(3, 7), draw_message(3, 7)
    assert (first.text, first.seconds) == (again.text, again.seconds)
    assert torch.equal(first.sound(RATE), again.sound(RATE))
    assert first.text != draw_message(3, 8).text
    assert first.text != draw_message(4, 7).text


def test_messages_are_within_their_limits() -> None:
    messages = [draw_message(0, index) for index in range(300)]
    assert {len(one.text) for one in messages} >= {CHARACTERS[0], CHARACTERS[1]}
    for one in messages:
        assert CHARACTERS[0] <= len(one.text) <= CHARACTERS[1]
        assert "  " not in one.text
        assert one.text == one.text.strip()
        assert set(one.text) <= {" ", *CODE}
        assert WORDS_PER_MINUTE[0] <= one.words_per_minute <= WORDS_PER_MINUTE[1]
        assert FREQUENCIES[0] <= one.frequency <= FREQUENCIES[1]
        assert SNRS[0] <= one.snr <= SNRS[1]
        assert all(a < b for a, b in pairwise(one.edges))
    assert {character for one in messages for character in one.text} == {" ", *CODE}


def test_practice_is_mostly_short_and_in_noise() -> None:
    messages = [draw_message(0, index, _above, practice=True) for index in range(2000)]
    lengths = np.array([len(message.text) for message in messages])
    assert (lengths.min(), lengths.max()) == (1, CHARACTERS[1])
    assert [np.mean(lengths == n) for n in range(1, 9)] == pytest.approx(
        [0.9 / 8] * 4 + [0.9 / 8 + 0.1 / 36] * 4, abs=0.03
    )
    singles = {message.text for message in messages} & set(CODE)
    assert singles == set(CODE), "single characters are of any kind"
    snrs = np.array([message.snr for message in messages])
    assert SNRS[0] <= snrs.min()
    assert snrs.max() <= SNRS[1]
    assert np.mean(snrs < SNRS[0] + (SNRS[1] - SNRS[0]) / 4) == pytest.approx(0.5, abs=0.035)  # three standard errors


def test_words_are_of_the_kind_that_is_asked_for() -> None:
    words = [{w for i in range(100) for w in draw_message(0, i, kind).text.split()} for kind in (_below, _above)]
    assert words[0]
    assert words[1]
    assert {len(word) for word in words[0]} == set(range(WORDS[0], WORDS[1] + 1))
    assert not words[0] & words[1]


def _below(word: str) -> bool:
    return share_of(word) < 0.1


def _above(word: str) -> bool:
    return share_of(word) >= 0.1


def test_the_standard_word_takes_a_minute_over_its_rate() -> None:
    """PARIS has 50 dots with the space behind it (43 without); even without jitter the speed may change by a tenth."""
    lengths = [np.ptp(Message(text="PARIS", words_per_minute=20, frequency=600, snr=20, key=(0, k)).edges)
               for k in range(200)]  # fmt: skip
    assert np.mean(lengths) == pytest.approx(43 * 1.2 / 20, rel=0.01)
    assert np.std(lengths) < 0.1 * np.mean(lengths)


@pytest.mark.parametrize("snr", [20.0, -5.0])
def test_the_tone_is_where_and_as_loud_as_it_is_said(snr: float) -> None:
    message = Message(text="TTTTTTTTTT", words_per_minute=12, frequency=700, snr=snr, key=(0, 1))
    sound = message.sound(RATE)
    times = torch.arange(len(sound)) / RATE
    edges = torch.from_numpy(message.edges)
    on = torch.searchsorted(edges, times.double()) % 2 == 1
    spectrum = torch.fft.rfft(sound).abs()
    peak = float(spectrum.argmax()) * RATE / len(sound)
    assert abs(peak - 700) <= 15
    powers = [float(sound[part].square().mean()) for part in (on, ~on)]
    # Half of the noise's 2 kHz is heard; the tone has up to half of its amplitude faded away.
    ratio = 10 * np.log10((powers[0] - powers[1]) / (2 * powers[1]))
    assert snr - 6.5 <= ratio <= snr + 1.5


def test_a_rate_that_cannot_carry_the_tone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sample_rate is 1000, expected at least 2000 for Morse code$"):
        draw_message(0, 0).sound(1000)


def test_other_rates_have_the_same_message() -> None:
    message = draw_message(0, 0)
    assert len(message.sound(16000)) == pytest.approx(8 * len(message.sound(RATE)), abs=8)
