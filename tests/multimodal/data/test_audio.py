"""Sound from files, and its spectrograms against OpenAI's."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from multimodal.data import audio
from multimodal.data.audio import LogMel, Sound, load_audio, open_sound
from tests.parity.keys import assert_close

RATE = 16000


def tone(seconds: float, rate: int = RATE, pitch: float = 440.0) -> Tensor:
    return 0.5 * torch.sin(2 * torch.pi * pitch * torch.arange(round(seconds * rate)) / rate)


def write(path: Path, samples: Tensor, rate: int = RATE, **options: Any) -> Path:
    """Samples [N] or [channels, N] as a file of the kind that its name says."""
    soundfile.write(path, np.atleast_2d(samples.numpy()).T, rate, **options)
    return path


def spoken(seconds: float) -> Tensor:
    """Noise that comes and goes."""
    noise = torch.randn(round(seconds * RATE)) * 0.1
    return noise * (1 + torch.sin(torch.arange(len(noise)) / 3000))


def noise_of(lengths: list[int]) -> Sound:
    pieces = [torch.randn(length) for length in lengths]
    return Sound("noise", lambda: iter(pieces))


# ---------------------------------------------------------------------------------------------------------- spectrogram


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.03, 1.0, 4.137])
def test_the_spectrogram_is_openais(num_mels: int, seconds: float) -> None:
    theirs = pytest.importorskip("whisper.audio")
    mel, samples = LogMel(num_mels=num_mels), spoken(seconds)
    assert_close(mel(samples), theirs.log_mel_spectrogram(samples, num_mels))
    expected = theirs.log_mel_spectrogram(samples, num_mels, padding=480000)[:, : len(samples) // 160]
    reader = mel.read(Sound.of(samples, RATE))
    assert reader.num_frames == len(samples) // 160
    assert_close(reader.window(0, reader.num_frames, size=reader.num_frames), expected)


def test_loud_and_quiet_clips_do_not_change_each_other() -> None:
    mel = LogMel()
    clips = torch.stack([spoken(1.0), 0.001 * spoken(1.0)])
    together = mel(clips)
    for clip, of_batch in zip(clips, together, strict=True):
        assert_close(of_batch, mel(clip))


def test_blocks_of_frames_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    mel, clips = LogMel(), torch.stack([spoken(2.0), spoken(2.0)])
    at_once = mel(clips)
    for frames in (1, 7, 400):
        monkeypatch.setattr(audio, "_FRAMES", frames)
        assert_close(mel(clips), at_once)


def test_the_spectrogram_is_of_single_precision_whatever_surrounds_it() -> None:
    mel, samples = LogMel(), spoken(1.0)
    expected = mel(samples)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(mel(samples), expected)
    assert mel(samples.double()).dtype == mel(samples[:100].double()).dtype == torch.float32
    with torch.inference_mode():  # what is kept for the next call serves with gradients too
        LogMel(num_mels=40)(samples)
    samples.requires_grad_()
    LogMel(num_mels=40)(samples).sum().backward()
    assert samples.grad is not None
    assert samples.grad.isfinite().all()


def test_windows_are_parts_of_the_whole_whatever_the_blocks() -> None:
    mel, lengths = LogMel(), [70, 90, 1, 40000, 333, 16000]
    sound = noise_of(lengths)
    whole = mel.read(Sound.of(torch.cat(list(sound.blocks())), RATE))
    reader = mel.read(sound)
    assert reader.num_frames == whole.num_frames == sum(lengths) // 160
    expected = whole.window(0, whole.num_frames, size=whole.num_frames)
    for start, count in ((0, 10), (5, 200), (300, 100), (20, 50), (whole.num_frames - 7, 100)):  # one is behind another
        window = reader.window(start, count, size=count)
        real = min(count, whole.num_frames - start)
        assert_close(window[:, :real], expected[:, start : start + real])
        assert not window[:, real:].any()


@pytest.mark.parametrize("length", [0, 1, 100, 159, 160, 200, 201, 400])
def test_very_short_sound(length: int) -> None:
    samples = torch.rand(length)
    reader = LogMel().read(Sound.of(samples, RATE))
    assert reader.num_frames == length // 160
    assert reader.window(0, 10, size=10).isfinite().all()
    assert LogMel()(samples).shape == (80, length // 160)


def test_silence_is_told_from_sound() -> None:
    samples = torch.cat([torch.zeros(RATE), 3e-4 * torch.randn(RATE)])
    reader = LogMel().read(Sound.of(samples, RATE))
    assert reader.is_silent(0, 90)
    assert not reader.is_silent(0, 110)
    assert not reader.is_silent(100, 100)


def test_settings_travel_as_plain_data() -> None:
    mel = LogMel(num_mels=128)
    plain = {"num_mels": 128, "sample_rate": 16000, "fft_size": 400, "hop_length": 160}
    assert mel.to_dict() == plain | {"mean": 0.0, "std": 1.0}
    assert LogMel.from_dict(plain) == mel
    assert LogMel.from_dict(mel.to_dict()) == mel
    with pytest.raises(
        ValueError, match=r"^preprocess record has size: expected fft_size, hop_length, mean, num_mels, "
    ):
        LogMel.from_dict({"size": 3})
    with pytest.raises(ValueError, match=r"^hop_length is 0, expected a whole number of at least 1$"):
        LogMel(hop_length=0)
    with pytest.raises(ValueError, match=r"^mean and std are 0.0 and 0, expected finite numbers, std above 0$"):
        LogMel(std=0)
    with pytest.raises(ValueError, match=r"^mean and std are '1' and 1.0, expected"):
        LogMel.from_dict({"mean": "1"})


def test_mean_and_std_change_the_scale_alone() -> None:
    samples, scaled = torch.rand(RATE), LogMel(mean=0.15, std=0.2)
    expected = (LogMel()(samples) - 0.15) / 0.2
    assert_close(scaled(samples), expected)
    assert_close(scaled.read(Sound.of(samples, RATE)).window(0, 60, size=60), expected[:, :60])


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_formats(name: str, tmp_path: Path) -> None:
    samples = tone(1.0)
    found = load_audio(write(tmp_path / name, samples))
    assert abs(len(found) - RATE) < 2000  # mp3 adds a little
    middle = slice(4000, 12000)
    spectrum = torch.fft.rfft(found[middle]).abs()
    assert int(spectrum.argmax()) == 220  # of 8000 samples at 16 kHz
    if name in ("a.wav", "a.flac"):
        assert (found - samples).abs().max() <= 1.1 / 32768  # 16 bits


def test_channels_are_averaged(tmp_path: Path) -> None:
    left, right = tone(0.5), tone(0.5, pitch=1000)
    path = write(tmp_path / "a.wav", torch.stack([left, right]), subtype="FLOAT")
    assert_close(load_audio(path), (left + right) / 2)
    assert_close(next(Sound.of(torch.stack([left, right]), RATE).blocks()), (left + right) / 2)


def test_recordings_of_a_folder(tmp_path: Path) -> None:
    for name in ("b/10.wav", "b/9.FLAC", "a.mp3", ".hidden.wav", "text.txt", "folder.wav/c.ogg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [path.relative_to(tmp_path).as_posix() for path in audio.list_audio(tmp_path)]
    assert names == ["a.mp3", "b/9.FLAC", "b/10.wav", "folder.wav/c.ogg"]


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 44101, 96000])
def test_other_rates(rate: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", tone(2.0, rate), rate, subtype="FLOAT")
    found = load_audio(path)
    assert abs(len(found) - 2 * RATE) <= 1
    inner = slice(RATE // 2, 3 * RATE // 2)
    assert (found - tone(2.0)[: len(found)])[inner].abs().max() < 2e-3


@pytest.mark.parametrize(("old", "new"), [(44100, 16000), (8000, 16000), (11025, 16000)])
def test_blocks_are_resampled_as_if_together(old: int, new: int) -> None:
    lengths = [3, 50000, 7, 1000, 441]
    sound = noise_of(lengths)
    samples = torch.cat(list(sound.blocks()))
    apart = torch.cat(list(audio._resampled(sound.blocks(), old, new, "noise")))
    together = torch.cat(list(audio._resampled(iter([samples]), old, new, "noise")))
    assert len(apart) == len(together) == -(-len(samples) * new // old)
    assert_close(apart, together)


def test_samples_in_memory_need_a_rate_and_numbers() -> None:
    with pytest.raises(TypeError):
        Sound.of(torch.zeros(5))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^audio: torch\.int64 \[5\], expected floating-point samples \[N\] or "):
        Sound.of(torch.zeros(5, dtype=torch.long), RATE)
    # Of numbers as large as the last one the mel power is infinite.
    for value, told in ((torch.nan, "nan"), (-torch.inf, "-inf"), (1e25, "1e\\+25")):
        samples = torch.zeros(10)
        samples[7] = value
        with pytest.raises(ValueError, match=rf"^audio: sample 7 is {told}, expected numbers of about -1 … 1$"):
            list(Sound.of(samples, RATE).blocks())
    assert len(torch.cat(list(Sound.of(torch.full((10,), 32768.0), RATE).blocks()))) == 10


@pytest.mark.parametrize("rate", [0, 1, 7])
def test_a_rate_too_low_to_resample_is_named(rate: int) -> None:
    with pytest.raises(ValueError, match=rf"^audio: {rate} samples a second, expected a rate that can be brought to"):
        list(Sound.of(torch.zeros(10), rate).blocks())


def test_bad_files_are_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no FFmpeg
    (tmp_path / "empty.wav").touch()
    for name in ("text.wav", "film.mp4", "bare.raw"):
        (tmp_path / name).write_bytes(b"this is no sound " * 50)
    whole = write(tmp_path / "a.flac", spoken(3.0)).read_bytes()
    (tmp_path / "broken.flac").write_bytes(whole[: len(whole) // 2] + bytes(2000) + whole[len(whole) // 2 :])
    nan = np.zeros(100, np.float32)
    nan[42] = np.nan
    soundfile.write(tmp_path / "nan.wav", nan, RATE, subtype="FLOAT")
    cases = {
        "none.wav": "no such file, expected an audio file",
        "empty.wav": "the file is empty, expected an audio file",
        "text.wav": "and FFmpeg, which reads more formats, is not installed",
        "film.mp4": "soundfile cannot read it (Format not recognised), and FFmpeg",
        "bare.raw": "soundfile cannot read it (",
        "broken.flac": "damaged (",
        "nan.wav": "sample 42 is nan, expected numbers of about -1 … 1",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            load_audio(tmp_path / name)
        told = str(caught.value)
        assert told.startswith(f"{tmp_path / name}: "), told
        assert message in told, told
        assert "\n" not in told
    assert len(load_audio(write(tmp_path / "zero.wav", torch.zeros(0)))) == 0


FFMPEG = """#!{python}
import sys
path = next(a for a in sys.argv if a.startswith("file:"))
if "bad" in path:
    sys.exit(f"{{path}}: Invalid data found")
rate = sys.argv[sys.argv.index("-ar") + 1]
assert "f32le" in sys.argv and "-nostdin" in sys.argv
import struct
sys.stdout.buffer.write(struct.pack("<4f", 0.5, -0.5, 0.25, float(rate) / 1e6))
"""


def test_ffmpeg_reads_what_soundfile_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    program = tmp_path / "ffmpeg"
    program.write_text(FFMPEG.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("film.mp4", "-bad.mp4"):
        (tmp_path / name).write_bytes(b"no sound for soundfile")
    assert load_audio(tmp_path / "film.mp4").tolist() == pytest.approx([0.5, -0.5, 0.25, 0.016])
    with pytest.raises(ValueError, match=r"neither soundfile nor FFmpeg can read it \(Invalid data found\)"):
        list(open_sound(tmp_path / "-bad.mp4").blocks())


def test_memory_stays_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of sound, of which the reader holds about a window."""
    monkeypatch.setattr(LogMel, "_log", lambda mel, samples, count: torch.zeros(80, count))
    block = torch.zeros(1 << 18)
    reader = LogMel().read(Sound("hour", lambda: (block for _ in range(220))))
    assert reader.num_frames == 220 * len(block) // 160
    held = []
    for start in range(0, reader.num_frames, 3000):
        reader.window(start, 3000, size=3000)
        held.append(reader._buffer.shape[1])
    assert max(held) <= 3000 + 2 * len(block) // 160
