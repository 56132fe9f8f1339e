"""Where there is speech."""

from pathlib import Path

import pytest
import torch

from multimodal.data.audio import Sound, load_audio
from tasks.whisper import speech
from tasks.whisper.speech import SpeechFinder

RATE = 16000


def test_speech_between_silence(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("silero_vad")
    said = load_audio(shared / "data/utterances/wav/LJ001-0002.wav")
    silence = torch.zeros(8 * RATE)
    samples = torch.cat([silence, said, silence, said, said, silence])
    seconds, length = len(said) / RATE, len(samples) / RATE
    threads = torch.get_num_threads()
    for piece in (300 * RATE, 10 * RATE):  # a piece may end within speech
        monkeypatch.setattr(speech, "_PIECE", piece)
        first, second = SpeechFinder()(Sound.of(samples, RATE))
        assert first == pytest.approx((8.0, 8.0 + seconds), abs=0.5)
        assert second == pytest.approx((16.0 + seconds, 16.0 + 3 * seconds), abs=0.5)
        assert second[1] <= length
    assert torch.get_num_threads() == threads
    assert SpeechFinder()(Sound.of(silence, RATE)) == []
    assert SpeechFinder()(Sound.of(torch.zeros(0), RATE)) == []


def test_without_the_package_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "silero_vad", None)
    with pytest.raises(
        ValueError, match=r"^--vad needs silero_vad: pip install 'multimodal-transformer-suite\[audio\]'$"
    ):
        SpeechFinder()
