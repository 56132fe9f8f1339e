"""What training changes in a recording."""

import re
from typing import Any

import pytest
import torch

from multimodal.data import seeded
from tasks.whisper.augment import SpeechAugment


def test_masks_hide_bands_and_stretches_of_bounded_width() -> None:
    augment = SpeechAugment(channel_masks=1, channel_width=3, time_masks=1, time_width=0.1)
    widths = set()
    for key in range(50):
        mel = torch.randn(20, 100)
        with seeded(key):
            hidden = augment.hide(mel)
        changed = hidden != mel
        assert (hidden[changed] == mel.mean()).all()
        channels, frames = int(changed.all(dim=1).sum()), int(changed.all(dim=0).sum())
        assert channels <= 3
        assert frames <= 10
        assert int(changed.sum()) == channels * 100 + frames * 20 - channels * frames
        widths.add((channels, frames))
    assert {w for w, _ in widths} == {0, 1, 2, 3}
    assert {w for _, w in widths} >= {0, 10}


def test_speed_changes_length_and_pitch_together() -> None:
    tone = torch.sin(2 * torch.pi * 100 * torch.arange(8000) / 8000)
    lengths = []
    for key in range(30):
        with seeded(key):
            played = SpeechAugment(speed=0.2).play(tone, 20000)
        lengths.append(len(played))
        crossings = int((played[1:] * played[:-1] < 0).sum())
        assert abs(crossings - 200) <= 2, "as many periods as before"
    assert 6500 < min(lengths) < 7200
    assert 8800 < max(lengths) <= 10000


def test_nothing_becomes_longer_than_the_window() -> None:
    for key in range(20):
        with seeded(key):
            assert len(SpeechAugment(speed=0.5).play(torch.randn(1000), 1000)) <= 1000


def test_without_options_nothing_changes() -> None:
    samples, mel = torch.randn(50), torch.randn(4, 9)
    assert SpeechAugment().play(samples, 50) is samples
    assert SpeechAugment().hide(mel) is mel


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"time_width": 1.0}, "data.augment.time_width is 1.0, expected a share between 0 and 1"),
        ({"channel_masks": -1}, "data.augment.channel_masks is -1, expected at least 0"),
        ({"speed": 1.0}, "data.augment.speed is 1.0, expected a share from 0 to below 1"),
    ],
)
def test_bad_options_are_one_line(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SpeechAugment(**option)
