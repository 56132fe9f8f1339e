"""CTC's prefix probabilities against the sum over all paths."""

from itertools import groupby, product

import pytest
import torch
from torch import Tensor

from multimodal.ctc import CTCPrefix

BLANK = 2


def brute(log_probs: Tensor, text: list[int]) -> Tensor:
    """The logarithm of each next token's probability behind `text`, by all paths of one row [A, V]."""
    shares = torch.zeros(log_probs.shape[1], dtype=torch.float64)
    for path in product(range(log_probs.shape[1]), repeat=len(log_probs)):
        said = [token for token, _ in groupby(path) if token != BLANK]
        if said[: len(text)] == text:
            following = said[len(text)] if len(said) > len(text) else BLANK
            shares[following] += log_probs[range(len(path)), path].sum().exp()
    return (shares / shares.sum()).log()


@pytest.mark.parametrize("text", [[], [0], [0, 0], [0, 1, 1], [3, 0, 3]])
def test_prefixes_have_the_probability_of_all_their_paths(text: list[int]) -> None:
    logits = 2 * torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    prefix = CTCPrefix(logits, BLANK)
    for token in text:
        prefix.append(torch.tensor([token, token]))
    expected = torch.stack([brute(row.double().log_softmax(-1), text) for row in logits])
    torch.testing.assert_close(prefix.scores(), expected.float(), rtol=1e-5, atol=1e-5)


def test_padding_says_nothing_and_rows_may_be_reordered() -> None:
    logits = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    prefix = CTCPrefix(logits, BLANK, mask)
    prefix.append(torch.tensor([1, 0]))
    prefix.reorder(torch.tensor([1, 1, 0]))
    prefix.append(torch.tensor([3, 0, 1]))
    expected = [brute(logits[1, :4].double().log_softmax(-1), [0, token]) for token in (3, 0)]
    expected.append(brute(logits[0].double().log_softmax(-1), [1, 1]))
    torch.testing.assert_close(prefix.scores().exp(), torch.stack(expected).float().exp(), rtol=1e-5, atol=1e-5)


def test_long_sounds_stay_finite() -> None:
    logits = 8 * torch.randn(1, 1500, 50, generator=torch.Generator().manual_seed(2))
    prefix = CTCPrefix(logits, BLANK)
    for token in (5, 5, 9, 40):
        prefix.append(torch.tensor([token]))
        scores = prefix.scores()
        assert bool(scores.isfinite().all())
        assert float(scores.exp().sum()) == pytest.approx(1, abs=1e-5)
