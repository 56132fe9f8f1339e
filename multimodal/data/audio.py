"""Audio files to log-mel spectrograms, block by block, so that hours of sound need no more memory than minutes.

N samples, C mel channels, T frames
"""

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchaudio.transforms import Resample

from multimodal.data.image import natural_key

SAMPLE_RATE = 16000
"""Samples a second that Whisper takes."""
_FILMS = frozenset((".mka", ".mkv", ".mov", ".mp4", ".webm"))
_SOUNDS = frozenset((".aac", ".aif", ".aiff", ".au", ".flac", ".m4a", ".mp3", ".oga", ".ogg", ".opus", ".wav", ".wma"))
AUDIO_EXTENSIONS = _SOUNDS | _FILMS
"""How the files of a folder end that are taken for recordings."""
_BLOCK = 1 << 18
"""Samples that are decoded at a time."""
_FRAMES = 1024
"""Frames that are transformed at a time on CPU, so that what is made on the way stays in its cache."""
_LOUDEST = 1e12
"""Samples from which on the mel power is more than float32 can express, with room to spare."""
_SILENCE = -8.0
"""Logarithm of the mel power that 16 bits can hardly express."""

# ------------------------------------------------------------------------------------------------------------- sound


@dataclass(frozen=True)
class Sound:
    """Sound of any length, in one channel."""

    name: str
    """What errors call it."""
    blocks: Callable[[], Iterator[Tensor]]
    """Its samples from the beginning, float32 [N] about -1 … 1, some at a time."""

    @classmethod
    def of(cls, samples: Tensor, rate: int, *, to: int = SAMPLE_RATE, name: str = "audio") -> "Sound":
        """Samples in memory, [N] or [channels, N], of `rate` a second, as sound of `to` a second."""
        if samples.dim() not in (1, 2) or not samples.is_floating_point():
            kind = f"{samples.dtype} {list(samples.shape)}"
            raise ValueError(f"{name}: {kind}, expected floating-point samples [N] or [channels, N]")
        mono = samples.float() if samples.dim() == 1 else samples.float().mean(0)
        return cls(name, lambda: _resampled(_checked([mono], name), rate, to, name))


def open_sound(path: str | os.PathLike[str], rate: int = SAMPLE_RATE) -> Sound:
    """An audio file as sound of `rate` samples a second: channels are averaged, other rates resampled.

    Decoded by soundfile (wav, flac, ogg, mp3, …), and by FFmpeg, where it is installed, what soundfile cannot read.

    Raises:
        ValueError: one line "file: what was found, what was expected"; from `blocks` as well, where a file turns out
            to be damaged or holds a sample that is no number.
    """
    name = os.fspath(path)
    if not Path(name).is_file():
        raise ValueError(f"{name}: no such file, expected an audio file")
    if not Path(name).stat().st_size:
        raise ValueError(f"{name}: the file is empty, expected an audio file")
    try:
        info = soundfile.info(name)
    except (soundfile.LibsndfileError, TypeError) as error:  # a TypeError for a headerless .raw
        found = str(getattr(error, "error_string", error)).rstrip(".")
        if shutil.which("ffmpeg") is None:
            raise ValueError(
                f"{name}: soundfile cannot read it ({found}), and FFmpeg, which reads more formats, is not installed"
            ) from error
        return Sound(name, lambda: _checked(_by_ffmpeg(name, rate), name))
    return Sound(name, lambda: _resampled(_checked(_by_soundfile(name), name), info.samplerate, rate, name))


def list_audio(folder: str | os.PathLike[str]) -> list[Path]:
    """All files below `folder` with the name of a recording, in natural order; hidden files are left out."""
    found = (path for path in Path(folder).rglob("[!.]*") if path.suffix.lower() in AUDIO_EXTENSIONS)
    return sorted((path for path in found if path.is_file()), key=lambda path: natural_key(path.as_posix()))


def load_audio(path: str | os.PathLike[str], rate: int = SAMPLE_RATE) -> Tensor:
    """A whole audio file, float32 [N]; see `open_sound`."""
    return torch.cat([torch.zeros(0), *open_sound(path, rate).blocks()])


def duration(path: str | os.PathLike[str]) -> float:
    """Seconds of an audio file, by its header where soundfile reads it, else by decoding; see `open_sound`."""
    sound = open_sound(path)  # which tells what is wrong
    try:
        info = soundfile.info(os.fspath(path))
    except (soundfile.LibsndfileError, TypeError):
        return sum(map(len, sound.blocks())) / SAMPLE_RATE
    return float(info.frames / info.samplerate)


def _by_soundfile(name: str) -> Iterator[Tensor]:
    try:
        with soundfile.SoundFile(name) as file:
            while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
                yield torch.from_numpy(block).mean(1)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{name}: damaged ({error.error_string.rstrip('.')}), expected a whole audio file") from error


def _by_ffmpeg(name: str, rate: int) -> Iterator[Tensor]:
    command = ["ffmpeg", "-nostdin", "-v", "error", "-i", f"file:{name}"]
    command += ["-map", "0:a:0", "-ac", "1", "-ar", str(rate), "-f", "f32le", "-"]
    with (
        tempfile.TemporaryFile() as told,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told) as process,
    ):
        assert process.stdout is not None
        try:
            while data := process.stdout.read(4 * _BLOCK):
                yield torch.frombuffer(bytearray(data), dtype=torch.float32)
            if process.wait():
                told.seek(0)
                found = " ".join(told.read(2000).decode(errors="replace").split()).removeprefix(f"file:{name}: ")
                raise ValueError(f"{name}: neither soundfile nor FFmpeg can read it ({found}), expected an audio file")
        finally:
            process.kill()  # who reads on no further does not want the rest


def _checked(blocks: Iterable[Tensor], name: str) -> Iterator[Tensor]:
    done = 0
    for block in blocks:
        wrong = (~(block.abs() < _LOUDEST)).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(f"{name}: sample {done + at} is {block[at].item():g}, expected numbers of about -1 … 1")
        done += len(block)
        yield block


def _resampled(blocks: Iterator[Tensor], source: int, target: int, name: str) -> Iterator[Tensor]:
    """Blocks of `source` samples a second as such of `target`, the same as if all were resampled together.

    The ratio is rounded to one of small numbers, for which the filter stays small; those of usual rates are exact.
    """
    ratio = Fraction(source, target).limit_denominator(1000) if target > 0 else Fraction(0)
    if ratio <= 0:
        raise ValueError(f"{name}: {source} samples a second, expected a rate that can be brought to {target}")
    if ratio == 1:
        yield from blocks
        return
    old, new = ratio.numerator, ratio.denominator
    # A long filter that passes 94 % of the band: the settings that torchaudio's documentation calls kaiser_best.
    resample = Resample(
        old, new, "sinc_interp_kaiser", lowpass_filter_width=64, rolloff=0.9475937167399596, beta=14.769656459379492
    )
    around = old * (2 + 64 * -(-max(old, new) // new) // old)  # what the filter sees on each side, in whole periods
    buffer, seen, made = torch.zeros(around), 0, 0
    for block in chain(blocks, [None]):
        seen += 0 if block is None else len(block)
        due = -(-seen * new // old)
        buffer = torch.cat([buffer, torch.zeros(2 * around + old) if block is None else block])
        whole = (len(buffer) - 2 * around) // old * old
        if whole <= 0:
            continue
        out = resample(buffer[: whole + 2 * around])[around // old * new :][: whole // old * new]
        out = out[: due - made] if block is None else out
        buffer, made = buffer[whole:], made + len(out)
        yield out


# -------------------------------------------------------------------------------------------------------- spectrogram


@dataclass(frozen=True, kw_only=True)
class LogMel:
    """Log-mel spectrograms as Whisper has them (Radford et al. 2022, section 2.2); travels with the weights.

    Args:
        num_mels: channels, on Slaney's mel scale.
        sample_rate: samples a second.
        fft_size: samples of a frame, under a Hann window.
        hop_length: samples from one frame to the next.
        mean, std: subtracted from what Whisper takes as it is, and divided by.
    """

    num_mels: int = 80
    sample_rate: int = SAMPLE_RATE
    fft_size: int = 400
    hop_length: int = 160
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        numbers = self.mean, self.std
        if not all(type(one) in (int, float) and math.isfinite(one) for one in numbers) or self.std <= 0:
            raise ValueError(f"mean and std are {self.mean!r} and {self.std!r}, expected finite numbers, std above 0")
        for field in fields(self)[:-2]:
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name} is {value!r}, expected a whole number of at least 1")

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the form that checkpoints hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(record) - known):
            raise ValueError(f"preprocess record has {', '.join(unknown)}: expected {', '.join(sorted(known))}")
        return cls(**record)

    @property
    def frames_per_second(self) -> float:
        return self.sample_rate / self.hop_length

    def __call__(self, samples: Tensor) -> Tensor:
        """Samples [..., N] to spectrograms [..., C, N // hop_length], each clip by its own loudest frame."""
        around, count = self.fft_size // 2, samples.shape[-1] // self.hop_length
        if not count:
            return samples.new_zeros(*samples.shape[:-1], self.num_mels, 0, dtype=torch.float32)
        if (short := around + 1 - samples.shape[-1]) > 0:  # what is reflected has to be there
            samples = torch.nn.functional.pad(samples, (0, short))
        # Each frame stands in the middle of its window.
        before, behind = samples[..., 1 : around + 1].flip(-1), samples[..., -around - 1 : -1].flip(-1)
        log = self._log(torch.cat([before, samples, behind], dim=-1), count)
        return self._scaled(log, log.amax(dim=(-2, -1), keepdim=True))

    def read(self, sound: Sound) -> "MelReader":
        """The spectrogram of a sound, of which a window at a time is made."""
        return MelReader(self, sound)

    def _log(self, samples: Tensor, count: int) -> Tensor:
        """The logarithm of the mel power of the first `count` frames, float32 [..., C, count]."""
        window, filters = _tables(self, samples.device)
        frames = samples.reshape(-1, samples.shape[-1]).float().unfold(-1, self.fft_size, self.hop_length)[:, :count]
        at_once = max(1, _FRAMES // len(frames)) if samples.device.type == "cpu" else count
        logs = []
        with torch.autocast(samples.device.type, enabled=False):
            for some in frames.split(at_once, dim=1):
                spectrum = torch.fft.rfft(some * window)
                # Not by abs(), whose root and square take as long as all the rest.
                energy = spectrum.real.square().addcmul(spectrum.imag, spectrum.imag)  # [B, T, fft_size // 2 + 1]
                logs.append((filters @ energy.mT).clamp_(min=1e-10).log10_())
        return torch.cat(logs, dim=-1).reshape(*samples.shape[:-1], self.num_mels, count)

    def _scaled(self, log: Tensor, peak: Tensor) -> Tensor:
        """Eight decades below the peak, to about -1 … 1 before mean and std."""
        scaled = torch.maximum(log, peak - 8).add_(4).div_(4)
        return scaled if (self.mean, self.std) == (0, 1) else scaled.sub_(self.mean).div_(self.std)


@cache
@torch.inference_mode(False)
def _tables(mel: LogMel, device: torch.device) -> tuple[Tensor, Tensor]:
    """The window [fft_size] and the filters, on a device."""
    return torch.hann_window(mel.fft_size, device=device), _filters(mel).to(device)


def _filters(mel: LogMel) -> Tensor:
    """The triangles of Slaney's mel scale, of equal area, over the bins of the transform: [C, fft_size // 2 + 1].

    In float64, since torchaudio's float32 differ by more than 1e-5 from those of the published weights.
    """
    highest = mel.sample_rate / 2
    edges = _hertz(np.linspace(0.0, _mels(highest), mel.num_mels + 2))
    bins = np.linspace(0.0, highest, mel.fft_size // 2 + 1)
    left, middle, right = (edges[first : first + mel.num_mels, None] for first in range(3))
    triangles = np.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)).clip(min=0)
    return torch.from_numpy(triangles * 2 / (right - left)).float()


# Linear up to 1 kHz, which is 15 mels; 27 mels above it are a factor of 6.4.
def _mels(hertz: float) -> float:
    return hertz * 3 / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000, 6.4)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))


class MelReader:
    """The spectrogram of a whole sound, of which a window at a time is in memory.

    The scale of a spectrogram depends on its loudest frame, so the sound is read twice.

    Args:
        mel: the settings.
        sound: what is read.
    """

    def __init__(self, mel: LogMel, sound: Sound) -> None:
        self.mel = mel
        self.sound = sound
        self.num_frames = 0
        """Frames of the sound."""
        peak = torch.tensor(-10.0)
        for log in self._logs():
            self.num_frames += log.shape[1]
            peak = torch.maximum(peak, log.amax())
        self._peak = peak
        self._restart()

    def _restart(self) -> None:
        self._ahead = self._logs()
        self._start, self._buffer = 0, torch.zeros(self.mel.num_mels, 0)

    def window(self, start: int, count: int, *, size: int) -> Tensor:
        """`count` frames from `start`, and zeros behind them, as in the published code: [C, size]."""
        log = self._read(start, count)
        return torch.nn.functional.pad(self.mel._scaled(log, self._peak), (0, size - log.shape[1]))

    def is_silent(self, start: int, count: int) -> bool:
        """Whether `count` frames from `start` are all but zeros."""
        return bool((self._read(start, count) < _SILENCE).all())

    def _read(self, start: int, count: int) -> Tensor:
        """Frames as they are, [C, count], fewer at the end."""
        if start < self._start:
            self._restart()
        while self._start + self._buffer.shape[1] < min(start + count, self.num_frames):
            self._buffer = torch.cat([self._buffer, next(self._ahead)], dim=1)
            dropped = min(start - self._start, self._buffer.shape[1])
            self._start, self._buffer = self._start + dropped, self._buffer[:, dropped:]
        return self._buffer[:, start - self._start :][:, :count]

    def _logs(self) -> Iterator[Tensor]:
        """All frames in order, some at a time: [C, T]. The beginning is reflected, behind the end there is silence."""
        mel = self.mel
        pad, seen, made = mel.fft_size // 2, 0, 0
        buffer, begun = torch.zeros(0), False
        for block in chain(self.sound.blocks(), [None]):
            seen += 0 if block is None else len(block)
            buffer = torch.cat([buffer, torch.zeros(2 * mel.fft_size) if block is None else block])
            if not begun and len(buffer) > pad:
                buffer, begun = torch.cat([buffer[1 : pad + 1].flip(0), buffer]), True
            count = (len(buffer) - mel.fft_size) // mel.hop_length + 1
            if block is None:
                count = min(count, seen // mel.hop_length - made)
            if not begun or count < 1:
                continue
            yield mel._log(buffer, count)
            buffer, made = buffer[count * mel.hop_length :], made + count
