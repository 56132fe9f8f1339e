"""Connectionist temporal classification: how likely texts that begin in one way are, while they are being decoded.

R rows (sequences that are being generated), A audio tokens, V vocabulary
"""

import torch
from torch import Tensor


class CTCPrefix:
    """What a classifier of audio tokens says of the token that follows the text so far, all its alignments together
    ("Hybrid CTC/Attention Architecture for End-to-End Speech Recognition", Watanabe et al. 2017, section IV-B).

    The recurrences over audio tokens are sums of exponentials, so that each text token takes a few vector operations.

    Args:
        logits: [R, A, V] of each audio token.
        blank: the token that stands for none, and for the end of a text.
        mask: bool [R, A], False where an audio token is padding, behind the others; None = nowhere.
    """

    def __init__(self, logits: Tensor, blank: int, mask: Tensor | None = None) -> None:
        self.blank = blank
        log_probs = logits.double().log_softmax(-1)
        if mask is not None:  # padding is blank for certain
            certain = torch.full_like(log_probs[0, 0], -1e4)
            certain[blank] = 0.0
            log_probs = torch.where(mask[..., None], log_probs, certain)
        self.log_probs = log_probs
        silent = torch.nn.functional.pad(log_probs[..., blank].cumsum(-1), (1, 0))
        self._blank_ends = silent
        """After each number of audio tokens, from 0: of the text so far where the last one is blank, [R, A + 1]."""
        self._token_ends = torch.full_like(silent, -torch.inf)
        """The same where the last one is the text's last token."""
        self._last: Tensor | None = None
        """The text's last token, int64 [R]."""

    def scores(self) -> Tensor:
        """The logarithm of each next token's probability [R, V]; that of the blank is the probability of the end."""
        whole = torch.logaddexp(self._blank_ends, self._token_ends)
        before = whole[:, :-1, None]
        scores = (before + self.log_probs).logsumexp(1)
        if self._last is not None:  # which comes again only behind a blank
            again = self._blank_ends[:, :-1] + self.log_probs.gather(2, self._index(self._last))[..., 0]
            scores = scores.scatter(1, self._last[:, None], again.logsumexp(1, keepdim=True))
        scores[:, self.blank] = whole[:, -1]
        return scores.log_softmax(-1).float()

    def append(self, tokens: Tensor) -> None:
        """The texts go on with these tokens, int64 [R], none of them blank."""
        before = torch.logaddexp(self._blank_ends, self._token_ends)
        if self._last is not None:
            before = torch.where((tokens == self._last)[:, None], self._blank_ends, before)
        self._token_ends = _follow(before, self.log_probs.gather(2, self._index(tokens))[..., 0])
        self._blank_ends = _follow(self._token_ends, self.log_probs[..., self.blank])
        self._last = tokens

    def reorder(self, index: Tensor) -> None:
        """Row b becomes what row index[b] was, int64 [R']."""
        self.log_probs = self.log_probs.index_select(0, index)
        self._blank_ends = self._blank_ends.index_select(0, index)
        self._token_ends = self._token_ends.index_select(0, index)
        if self._last is not None:
            self._last = self._last.index_select(0, index)

    def _index(self, tokens: Tensor) -> Tensor:
        return tokens[:, None, None].expand(-1, self.log_probs.shape[1], 1)


def _follow(before: Tensor, log_probs: Tensor) -> Tensor:
    """Ends in a symbol that has begun at some audio token and lasted from there: [R, A + 1].

    Args:
        before: what it may begin behind, after each number of audio tokens, [R, A + 1].
        log_probs: of the symbol at each audio token [R, A].
    """
    lasted = torch.nn.functional.pad(log_probs.cumsum(-1), (1, 0))
    ends = lasted[:, 1:] + (before - lasted)[:, :-1].logcumsumexp(-1)
    return torch.nn.functional.pad(ends, (1, 0), value=-torch.inf)
