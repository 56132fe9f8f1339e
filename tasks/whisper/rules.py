"""Which tokens may follow: the decoding rules of Whisper ("Robust Speech Recognition via Large-Scale Weak Supervision",
Radford et al. 2022, section 4.5), as rules of `multimodal.generate`.

R rows, V vocabulary, n tokens generated so far
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.generate import Rule

NEVER = float("-inf")


class Suppress:
    """Tokens that never follow, and tokens that do not come first.

    Args:
        always: never.
        first: not as the first token.
    """

    def __init__(self, always: Sequence[int], first: Sequence[int] = ()) -> None:
        self.always = torch.tensor(sorted(set(always)), dtype=torch.long)
        self.first = torch.tensor(sorted(set(first)), dtype=torch.long)

    def __call__(self, logits: Tensor, generated: Tensor) -> Tensor:
        logits[:, self.always.to(logits.device)] = NEVER
        if not generated.shape[1]:
            logits[:, self.first.to(logits.device)] = NEVER
        return logits


class Timestamps:
    """Timestamps come in pairs, end and beginning, and go up; the first token is one, and where they are together more
    likely than any text, one of them follows.

    Args:
        begin: the token of 0.00 s; all from it on are timestamps.
        end: the token that ends a transcript; all below it are text.
        latest: index of the latest timestamp with which a transcript may begin; None = any.
    """

    def __init__(self, begin: int, end: int, latest: int | None = None) -> None:
        self.begin = begin
        self.end = end
        self.latest = latest

    def __call__(self, logits: Tensor, generated: Tensor) -> Tensor:
        begin, count = self.begin, generated.shape[1]
        if count:
            is_time = generated >= begin
            after = is_time[:, -1]  # the last token is a timestamp
            pair = after & (is_time[:, -2] if count > 1 else True)
            _forbid(logits[:, begin:], pair)
            _forbid(logits[:, : self.end], after & ~pair)
            # Not below the last one, nor again, but as the beginning that belongs to an end.
            last = generated.masked_fill(~is_time, begin - 1).amax(dim=1)
            least = torch.where(is_time.any(dim=1), last + (~(after & ~pair)).long(), begin)
            times = torch.arange(begin, logits.shape[1], device=logits.device)
            logits[:, begin:] = logits[:, begin:].masked_fill(times < least[:, None], NEVER)
        else:
            logits[:, :begin] = NEVER
            if self.latest is not None:
                logits[:, begin + self.latest + 1 :] = NEVER
        # Of logits as of probabilities: what they differ by is the same on both sides.
        _forbid(logits[:, :begin], logits[:, begin:].logsumexp(-1) > logits[:, :begin].amax(-1))
        return logits


def _forbid(logits: Tensor, rows: Tensor) -> None:
    """None of these tokens [R, V'] follows in these rows, bool [R]; the others are not even read."""
    for row in rows.nonzero()[:, 0].tolist():
        logits[row] = NEVER


def decoding_rules(
    tokenizer: SpeechTokenizer, *, timestamps: bool, suppress: Sequence[int] | None, latest: int | None
) -> list[Rule]:
    """What holds for a transcript.

    Args:
        tokenizer: whose tokens are meant.
        timestamps: whether it has times.
        suppress: tokens that never follow, besides those that only prompts have; None = marks that are not spoken.
        latest: see `Timestamps`.
    """
    always = [*tokenizer.only_in_prompts, *(tokenizer.not_spoken if suppress is None else suppress)]
    first = [*tokenizer.blank, tokenizer.end]
    if not timestamps:
        return [Suppress(always, first)]
    times = Timestamps(tokenizer.timestamps, tokenizer.end, latest)
    return [Suppress([*always, tokenizer.no_timestamps], first), times]
