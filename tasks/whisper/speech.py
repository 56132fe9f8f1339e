"""Where there is speech, by Silero's detector (the `silero-vad` package)."""

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from multimodal.data.audio import SAMPLE_RATE, Sound
from tasks.registry import DISTRIBUTION

_PIECE = 300 * SAMPLE_RATE
"""Samples that are looked at together, so that hours need no more memory."""
_GAP, _AROUND = 3.0, 0.2
"""Seconds of silence that are left in, and that are left at both ends."""


class SpeechFinder:
    """Finds speech in sounds of 16 kHz; ValueError where the package is not installed."""

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        try:
            from silero_vad import get_speech_timestamps, load_silero_vad
        except ModuleNotFoundError as error:
            raise ValueError(f"--vad needs {error.name}: pip install '{DISTRIBUTION}[audio]'") from error
        torch.set_num_threads(threads)  # which importing it has set to 1
        self._find = get_speech_timestamps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=FutureWarning)  # of how the package loads its model
            warnings.simplefilter("ignore", category=DeprecationWarning)
            self._model = load_silero_vad()

    def __call__(self, sound: Sound) -> list[tuple[float, float]]:
        """The parts (begin, end) of a sound in which there is speech, in seconds, in order and apart."""
        parts: list[tuple[float, float]] = []
        for offset, piece in _pieces(sound):
            for found in self._find(piece, self._model, sampling_rate=SAMPLE_RATE):
                begin, end = ((offset + found[edge]) / SAMPLE_RATE for edge in ("start", "end"))
                begin, end = max(0.0, begin - _AROUND), end + _AROUND
                if parts and begin - parts[-1][1] < _GAP:
                    parts[-1] = (parts[-1][0], end)
                else:
                    parts.append((begin, end))
        return parts


def _pieces(sound: Sound) -> Iterator[tuple[int, Tensor]]:
    """A sound in pieces, each with the sample at which it begins."""
    buffer, offset = torch.zeros(0), 0
    for block in sound.blocks():
        buffer = torch.cat([buffer, block])
        while len(buffer) >= _PIECE:
            yield offset, buffer[:_PIECE]
            offset, buffer = offset + _PIECE, buffer[_PIECE:]
    if len(buffer):
        yield offset, buffer
