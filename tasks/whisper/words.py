"""When each word is said, by the cross-attention of the heads that follow the speech ("dynamic time warping").

N tokens, A audio tokens (of 0.02 s)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models.whisper import Whisper
from tasks.whisper.decode import TOKEN_SECONDS
from tasks.whisper.segments import Segment, Word

_BEFORE, _AFTER = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_SENTENCE_ENDS = ".。!！?？"  # noqa: RUF001
_FILTER = 7


@dataclass
class Timed:
    """A word, or a piece of punctuation, in seconds from the beginning of the window."""

    text: str
    tokens: list[int] = field(repr=False)
    start: float
    end: float
    probability: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@torch.inference_mode()
def align(
    model: Whisper,
    tokenizer: SpeechTokenizer,
    audio: Tensor,
    tokens: Sequence[int],
    *,
    prompt: Sequence[int],
    language: str | None,
    length: int,
    token_seconds: float = TOKEN_SECONDS,
) -> list[Timed]:
    """The words of a window.

    Args:
        model, tokenizer: that made the tokens.
        audio: the encoded window [A, D].
        tokens: of its text, without timestamps.
        prompt: what the tokens follow; its last one says that there are no timestamps.
        language: that is spoken.
        length: how many of the audio tokens are sound.
        token_seconds: of an audio token.
    """
    words = tokenizer.words([*tokens, tokenizer.end], language)
    if len(words) < 2:
        return []
    row = torch.tensor([[*prompt, *tokens, tokenizer.end]], device=audio.device)
    logits, weights = model.cross_weights(row, audio[None])
    begin = len(prompt) - 1
    of_text = logits[0, begin : begin + len(tokens), : tokenizer.end].float().softmax(-1)
    chosen = of_text.gather(1, torch.tensor([tokens], device=audio.device).T)[:, 0].tolist()
    rows, columns = warp(-_matching(weights[0], length, begin))
    begins = np.diff(rows, prepend=-1) > 0  # where the path comes to each token
    times = columns[begins] * token_seconds
    at = np.cumsum([0, *(len(ids) for _, ids in words[:-1])])
    return [
        Timed(text, ids, float(times[first]), float(times[last]), float(np.mean(chosen[first:last])))
        for (text, ids), first, last in zip(words[:-1], at[:-1], at[1:], strict=True)
    ]


def _matching(weights: Tensor, length: int, begin: int) -> NDArray[np.float64]:
    """How well each token of the text, the end token included, fits each audio token: [N, length]."""
    weights = weights[:, :, : max(length, 1)].float()
    weights = weights / weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = (weights - mean) / std.clamp(min=1e-12)
    around = _FILTER // 2
    if weights.shape[-1] > around:
        padded = F.pad(weights, (around, around), mode="reflect")
        weights = padded.unfold(-1, _FILTER, 1).median(-1).values
    return weights.mean(0)[begin:-1].double().cpu().numpy()


def warp(cost: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cheapest path from corner to corner of a matrix [N, A], each step down, right or both: rows and columns.

    By diagonals, each of which numpy computes at once.
    """
    height, width = cost.shape
    total = np.full((height + 1, width + 1), np.inf, np.float32)
    total[0, 0] = 0
    move = np.zeros((height + 1, width + 1), np.int8)
    move[0, :], move[:, 0] = 2, 1
    for diagonal in range(2, height + width + 1):
        i = np.arange(max(1, diagonal - width), min(height, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        move[i, j] = step
        total[i, j] = cost[i - 1, j - 1] + np.choose(step, [both, down, right])
    i, j = height, width
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = move[i, j]
        i, j = i - (step != 2), j - (step != 1)
    rows, columns = np.array(path[::-1], dtype=np.int64).T
    return rows, columns


def _shorten(words: list[Timed], longest: float) -> None:
    """At the end of a sentence, where silence may have gone into a word."""
    for before, word in pairwise(words):
        if word.seconds > longest:
            if word.text in _SENTENCE_ENDS:
                word.end = word.start + longest
            elif before.text in _SENTENCE_ENDS:
                word.start = word.end - longest


def _with_punctuation(words: list[Timed]) -> list[Timed]:
    """Punctuation joined to the word that it stands before or behind; its own time is left out."""
    joined: list[Timed] = []
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in _BEFORE:
            following = joined[-1]
            following.text, following.tokens = word.text + following.text, word.tokens + following.tokens
        else:
            joined.append(word)
    words, joined = joined[::-1], []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in _AFTER:
            joined[-1].text, joined[-1].tokens = joined[-1].text + word.text, joined[-1].tokens + word.tokens
        else:
            joined.append(word)
    return joined


def add_words(
    segments: list[Segment], words: list[Timed], counts: Sequence[int], *, offset: float, last_speech: float
) -> None:
    """Give the segments of a window their words, and times that fit these.

    Args:
        segments: of one window, in their order.
        words: of all of them, from `align`.
        counts: tokens of text of each segment.
        offset: seconds at which the window begins.
        last_speech: when speech ended before.
    """
    spoken = [word.seconds for word in words if word.seconds > 0]
    middle = min(0.7, float(np.median(spoken))) if spoken else 0.0
    if spoken:
        _shorten(words, 2 * middle)
    waiting = _with_punctuation(words)
    for segment, tokens in zip(segments, counts, strict=True):
        segment.words = []
        while waiting and tokens > 0:
            word = waiting.pop(0)
            tokens -= len(word.tokens)
            start, end = round(offset + word.start, 2), round(offset + word.end, 2)
            segment.words.append(Word(word.text, start, end, word.probability))
        if segment.words:
            _fit(segment, segment.words, middle, last_speech)
            last_speech = segment.end


def _fit(segment: Segment, words: list[Word], middle: float, last_speech: float) -> None:
    """Shorten what is too long at both ends of a segment, where silence may have gone into a word."""
    longest = 2 * middle
    first, last = words[0], words[-1]
    second = words[1] if len(words) > 1 else None
    long = first.end - first.start > longest or (second is not None and second.end - first.start > 2 * longest)
    if first.end - last_speech > 4 * middle and long:
        if second is not None and second.end - second.start > longest:
            first.end = second.start = max(second.end / 2, second.end - longest)
        first.start = max(0.0, first.end - longest)
    if segment.start < first.end and segment.start - 0.5 > first.start:
        first.start = max(0.0, min(first.end - middle, segment.start))
    else:
        segment.start = first.start
    if segment.end > last.start and segment.end + 0.5 < last.end:
        last.end = max(last.start + middle, segment.end)
    else:
        segment.end = last.end
