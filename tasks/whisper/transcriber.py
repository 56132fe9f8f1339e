"""Many sounds at a time to transcripts: one window of each in a batch."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from multimodal.data.audio import LogMel, MelReader, Sound
from tasks.whisper.decode import Decoder
from tasks.whisper.segments import Transcript
from tasks.whisper.windows import Window, WindowOptions, Windows

Clips = Callable[[Sound], Sequence[tuple[float, float]]]
"""The parts (begin, end) of a sound in which there is speech, in seconds."""


class Transcriber:
    """What sounds say.

    Args:
        decoder: model, tokenizer and options of decoding.
        mel: the spectrogram that the model takes.
        options: what one window has to do with the next.
        language: that is spoken, a code such as `en`; None = the model tells for each sound, or knows but one.
        batch_size: windows, each of another sound, that are decoded at a time.
        clips: finds the parts that are transcribed; None = all.

    Raises:
        ValueError: a language that the model does not have; an initial prompt for one that has seen no text before.
    """

    def __init__(
        self,
        decoder: Decoder,
        mel: LogMel,
        options: WindowOptions,
        *,
        language: str | None = None,
        batch_size: int = 8,
        clips: Clips | None = None,
    ) -> None:
        tokenizer = decoder.tokenizer
        if not tokenizer.multilingual and (language not in (None, "en") or decoder.options.translate):
            asked = "translation" if decoder.options.translate else f"language {language!r}"
            raise ValueError(f"{asked}: the model is for one language alone, expected one of many languages")
        if tokenizer.multilingual and language is not None and language not in tokenizer.languages:
            raise ValueError(f"language {language!r}: expected one of {', '.join(tokenizer.languages)}")
        if options.initial_prompt and not decoder.timestamps:
            raise ValueError("initial prompt: the model was trained on texts alone, expected one with tokens for times")
        self.decoder = decoder
        self.mel = mel
        self.options = options
        self.language = language if tokenizer.multilingual else None
        self.batch_size = batch_size
        self.clips = clips

    def run(
        self,
        sources: Sequence[Callable[[], Sound]],
        progress: Callable[[float, float], None] = lambda done, found: None,
    ) -> Iterator[tuple[int, Transcript | ValueError]]:
        """Transcribe sounds.

        Args:
            sources: open a sound each, when its turn comes.
            progress: is told of seconds that are done, and of seconds that have been found to do.

        Yields:
            The index of a sound and its transcript, or what is wrong with it; as they are done.
        """
        waiting, going = deque(enumerate(sources)), deque[tuple[int, Windows]]()
        while waiting or going:
            ready: list[tuple[int, Windows, Window]] = []
            while len(ready) < self.batch_size and (waiting or going):
                if going:
                    index, windows = going.popleft()
                else:
                    index, source = waiting.popleft()
                    try:
                        windows = self._begin(source())
                    except ValueError as error:
                        yield index, error
                        continue
                    progress(0.0, windows.transcript().seconds)
                before = windows.frames_done
                try:
                    window = windows.next()
                except ValueError as error:  # a file that has changed since
                    yield index, error
                    continue
                progress((windows.frames_done - before) / self.mel.frames_per_second, 0.0)
                if window is None:
                    yield index, windows.transcript()
                else:
                    ready.append((index, windows, window))
            for alike in _by_length(ready):
                self._decode(alike, progress)
            going.extend((index, windows) for index, windows, _ in ready)

    def _decode(self, ready: list[tuple[int, Windows, Window]], progress: Callable[[float, float], None]) -> None:
        found = self.decoder.decode(
            self.decoder.encode(torch.stack([window.mel for _, _, window in ready])),
            [windows.language for _, windows, _ in ready],
            [window.previous for _, _, window in ready],
            [window.seed for _, _, window in ready],
        )
        for (_, windows, _), one in zip(ready, found, strict=True):
            before = windows.frames_done
            windows.take(one)
            progress((windows.frames_done - before) / self.mel.frames_per_second, 0.0)

    def _begin(self, sound: Sound) -> Windows:
        reader = self.mel.read(sound)
        language = self.language
        if language is None and self.decoder.tokenizer.multilingual:
            language = self._detect(reader)
        clips = None
        if self.clips is not None:
            rate = self.mel.frames_per_second
            clips = [(round(begin * rate), round(end * rate)) for begin, end in self.clips(sound)]
        return Windows(self.decoder, reader, language, self.options, clips)

    def _detect(self, reader: MelReader) -> str:
        """The language of the first window in which there is speech, or else that of the first with any sound."""
        size = self.decoder.model.config.frames
        threshold = self.decoder.options.no_speech_threshold
        first = None
        for start in range(0, reader.num_frames, size):
            if reader.is_silent(start, size):
                continue
            (language,) = self.decoder.languages(self.decoder.encode(reader.window(start, size, size=size)[None]))
            if threshold is None or language.no_speech <= threshold:
                return language.code
            first = first or language.code
        return first or next(iter(self.decoder.tokenizer.languages))


def _by_length(ready: list[tuple[int, Windows, Window]]) -> list[list[tuple[int, Windows, Window]]]:
    """Windows that go into one batch: a model that is not to look at padding gets none."""
    groups: dict[int, list[tuple[int, Windows, Window]]] = {}
    for one in ready:
        groups.setdefault(one[2].mel.shape[1], []).append(one)
    return list(groups.values())
