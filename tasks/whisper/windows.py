"""A sound in windows of thirty seconds, each of which begins where the last one's speech ends
("Robust Speech Recognition via Large-Scale Weak Supervision", Radford et al. 2022, section 4.5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from multimodal.data.audio import MelReader
from tasks.whisper.decode import TOKEN_SECONDS, Decoded, Decoder
from tasks.whisper.segments import Segment, Transcript
from tasks.whisper.words import add_words, align

_HOT = 0.5
"""A text that was drawn at a higher temperature is not shown to the next window."""


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """What one window has to do with the next."""

    use_previous: bool = True
    """Show the model the text before a window; one without tokens for times has never seen any, and is shown none."""
    initial_prompt: str | None = None
    """Text that is shown before the first window."""
    words: bool = False
    """Find when each word is said."""


class Window(NamedTuple):
    """What is to be decoded next."""

    mel: Tensor
    """[C, T], zeros behind the end; T is the same for all where the model looks at padding."""
    previous: list[int]
    """Tokens of the text before."""
    seed: int
    """For drawing."""


class Windows:
    """The windows of one sound, and the segments that were found so far.

    Args:
        decoder: with which they are decoded.
        reader: the spectrogram.
        language: that is spoken; None for a model that knows but one.
        options: see `WindowOptions`.
        clips: the parts (begin, end) of the sound that are transcribed, in frames; None = all of it.
    """

    def __init__(
        self,
        decoder: Decoder,
        reader: MelReader,
        language: str | None,
        options: WindowOptions,
        clips: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.decoder = decoder
        self.reader = reader
        self.language = language
        self.options = options
        self.stride = decoder.model.config.stem_stride
        self.size = decoder.model.config.frames
        self.padded = not decoder.model.config.mask_padding
        self.segments: list[Segment] = []
        self._clips = [(0, reader.num_frames)] if clips is None else list(clips)
        self._seek = self._count = 0
        self._last_speech = 0.0
        prompt = options.initial_prompt
        self._tokens = decoder.tokenizer.encode(f" {prompt.strip()}") if prompt else []
        self._shown_from = 0

    @property
    def frames_done(self) -> int:
        """How far it has come."""
        return min(self._seek, self.reader.num_frames) if self._clips else self.reader.num_frames

    def next(self) -> Window | None:
        """The next window in which there is anything to hear; None at the end."""
        while self._clips:
            begin, end = self._clips[0]
            self._seek = max(self._seek, begin)
            self._count = min(self.size, self.reader.num_frames - self._seek, end - self._seek)
            if self._count <= 0:
                self._clips.pop(0)
            elif self.reader.is_silent(self._seek, self._count):
                self._seek += self._count
            else:
                size = self.size if self.padded else -(-self._count // self.stride) * self.stride
                mel = self.reader.window(self._seek, self._count, size=size)
                return Window(mel, self._tokens[self._shown_from :], self._seek)
        return None

    def take(self, found: Decoded) -> None:
        """What was decoded of the window that `next` returned."""
        begin = self._seek
        if self.decoder.options.is_silent(found.no_speech, found.mean_log_prob):
            self._seek += self._count
            return
        segments, ahead, no_more = self._divide(found)
        self._seek += ahead
        if self.options.words:
            self._add_words(found, segments, begin, no_more=no_more)
        if self._seek <= begin:  # else it would be decoded for ever
            self._seek = begin + self._count
        for segment in segments:
            self._within(segment)
            # What takes no time was not said; its tokens are not shown to the next window either.
            if segment.start == segment.end or not segment.text.strip():
                continue
            self.segments.append(segment)
            self._tokens += segment.tokens
        if not (self.options.use_previous and self.decoder.timestamps) or found.temperature > _HOT:
            self._shown_from = len(self._tokens)

    def transcript(self) -> Transcript:
        """What was found."""
        seconds = self.reader.num_frames / self.reader.mel.frames_per_second
        return Transcript(self.reader.sound.name, self.language, seconds, self.segments)

    def _divide(self, found: Decoded) -> tuple[list[Segment], int, bool]:
        """The segments of a window, how many frames ahead the next one begins, and whether speech has ended before.

        A timestamp behind which nothing follows says that there is no more speech. Else what comes behind the last
        pair of them is cut off by the window's end, and left to the next one.
        """
        tokens, first = found.tokens, self.decoder.tokenizer.timestamps
        times = [token - first if token >= first else None for token in tokens]
        ends_once = len(times) > 0 and times[-1] is not None and (len(times) < 2 or times[-2] is None)
        cuts = [at for at in range(1, len(times)) if times[at - 1] is not None and times[at] is not None]
        offset = self._seek / self.reader.mel.frames_per_second
        if not cuts:
            said = [time for time in times if time]
            seconds = said[-1] * TOKEN_SECONDS if said else self._count / self.reader.mel.frames_per_second
            return [self._segment(found, tokens, offset, offset + seconds)], self._count, ends_once
        if ends_once:
            cuts.append(len(tokens))
        segments = []
        for start, end in zip([0, *cuts], cuts, strict=False):
            begin, until = times[start] or 0, times[end - 1] or 0
            segments.append(
                self._segment(found, tokens[start:end], offset + begin * TOKEN_SECONDS, offset + until * TOKEN_SECONDS)
            )
        return segments, self._count if ends_once else (times[cuts[-1] - 1] or 0) * self.stride, ends_once

    def _segment(self, found: Decoded, tokens: list[int], start: float, end: float) -> Segment:
        return Segment(
            start=start,
            end=end,
            text=self.decoder.tokenizer.decode(tokens),
            tokens=tokens,
            temperature=found.temperature,
            mean_log_prob=found.mean_log_prob,
            compression_ratio=found.compression_ratio,
            no_speech=found.no_speech,
        )

    def _add_words(self, found: Decoded, segments: list[Segment], begin: int, *, no_more: bool) -> None:
        decoder, tokenizer = self.decoder, self.decoder.tokenizer
        texts = [[token for token in segment.tokens if tokenizer.is_text(token)] for segment in segments]
        task = "translate" if decoder.options.translate else "transcribe"
        words = align(
            decoder.model,
            tokenizer,
            found.audio,
            [token for text in texts for token in text],
            prompt=tokenizer.prompt(self.language, task=task, timestamps=False),
            language=self.language,
            length=self._count // self.stride,
            token_seconds=self.stride / self.reader.mel.frames_per_second,
        )
        offset = begin / self.reader.mel.frames_per_second
        add_words(segments, words, [len(text) for text in texts], offset=offset, last_speech=self._last_speech)
        ends = [word.end for segment in segments for word in segment.words or ()]
        last = ends[-1] if ends else segments[-1].end
        if last > offset and not no_more:
            self._seek = round(last * self.reader.mel.frames_per_second)
        self._last_speech = last

    def _within(self, segment: Segment) -> None:
        """No time beyond the sound."""
        end = self.reader.num_frames / self.reader.mel.frames_per_second
        for one in (segment, *(segment.words or ())):
            one.start, one.end = min(one.start, end), min(one.end, end)
