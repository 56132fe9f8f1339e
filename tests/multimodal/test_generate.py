"""Generation over a table that tells the next token from the last one."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from multimodal.generate import Generated, beam_search, generate, most_likely

END = 3


class Chain:
    """A model whose next token depends on the last one, and which counts what it computes."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.rows: list[int] = []
        self.reordered: list[tuple[list[int], bool]] = []

    def __call__(self, tokens: Tensor, cache: "Chain") -> Tensor:
        assert cache is self
        self.rows.append(len(tokens))
        return self.table[tokens[:, 0]]

    def reorder(self, index: Tensor, *, context: bool = True) -> None:
        self.reordered.append((index.tolist(), context))


def likely(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).log()


TABLE = likely([0.1, 0.6, 0.1, 0.2], [0.1, 0.1, 0.7, 0.1], [0.2, 0.1, 0.1, 0.6], [0.25] * 4)


def limits(*values: int) -> Tensor:
    return torch.tensor(values)


def test_greedy_takes_the_most_likely_and_drops_what_has_ended() -> None:
    chain = Chain(TABLE)
    first = TABLE[[0, 2, 2]]
    found = generate(chain, chain, first, end=END, limits=limits(10, 10, 10))
    assert [one.tokens for one in found] == [[1, 2], [], []]
    assert found[0].log_prob == pytest.approx(float(torch.tensor(0.6 * 0.7 * 0.6).log()))
    assert found[0].mean_log_prob == pytest.approx(found[0].log_prob / 3)
    assert found[1].log_prob == pytest.approx(float(torch.tensor(0.6).log()))
    assert chain.rows == [1, 1]
    assert chain.reordered == [([0], True)]


def test_each_row_has_its_limit() -> None:
    chain = Chain(TABLE.index_fill(1, torch.tensor([END]), float("-inf")))
    found = generate(chain, chain, TABLE[[0, 0, 0]].clone(), end=END, limits=limits(1, 4, 2))
    assert [one.tokens for one in found] == [[1], [1, 2, 0, 1], [1, 2]]


def test_rules_see_what_was_generated() -> None:
    seen = []

    def no_second(logits: Tensor, generated: Tensor) -> Tensor:
        seen.append(generated.tolist())
        if generated.shape[1] == 1:
            logits[:, 2] = float("-inf")
        return logits

    chain = Chain(TABLE)
    (one,) = generate(chain, chain, TABLE[:1].clone(), end=END, limits=limits(3), rules=[no_second])
    assert seen == [[[]], [[1]], [[1, 0]]]
    assert one.tokens == [1, 0, 1]


def test_drawing_follows_the_probabilities_and_the_seed() -> None:
    first = TABLE[:1].expand(4000, -1)

    def draw(temperature: float, seed: int = 0) -> list[list[int]]:
        chain = Chain(TABLE)
        generator = torch.Generator().manual_seed(seed)
        found = generate(
            chain, chain, first, end=END, limits=limits(1).expand(4000), temperature=temperature, generator=generator
        )
        return [one.tokens for one in found]

    for temperature in (1.0, 0.5):
        share = draw(temperature).count([1]) / 4000
        expected = (TABLE[0] / temperature).softmax(-1)[1].item()
        assert share == pytest.approx(expected, abs=0.03)
    assert draw(1.0) == draw(1.0)
    assert draw(1.0) != draw(1.0, seed=1)


def every(first: Tensor, length: int) -> dict[tuple[int, ...], float]:
    """All sequences that end within `length` tokens, with the logarithms of their probabilities."""
    found = {}
    for count in range(length):
        for tokens in product(range(3), repeat=count):
            path = [*tokens, END]
            value = first[path[0]] + sum(TABLE[a, b] for a, b in pairwise(path))
            found[tokens] = float(value)
    return found


def test_a_wide_beam_finds_the_best_of_all() -> None:
    first = TABLE[[0, 1]]
    chain = Chain(TABLE)
    found = beam_search(chain, chain, first, end=END, limits=limits(5, 5), beam_size=40)
    for row, candidates in zip(first, found, strict=True):
        expected = every(row, 5)
        best = max(expected, key=lambda tokens: expected[tokens])
        top = max(candidates, key=lambda one: one.log_prob)
        assert top.tokens == list(best)
        assert top.log_prob == pytest.approx(expected[best], abs=1e-5)


def test_a_beam_of_one_is_greedy() -> None:
    chain = Chain(TABLE)
    found = beam_search(chain, chain, TABLE[[0, 2]], end=END, limits=limits(10, 10), beam_size=1)
    greedy = generate(chain, chain, TABLE[[0, 2]], end=END, limits=limits(10, 10))
    assert [candidates[0].tokens for candidates in found] == [one.tokens for one in greedy]


def test_patience_waits_for_more() -> None:
    counts = []
    for patience in (1.0, 2.0):
        chain = Chain(TABLE)
        (candidates,) = beam_search(chain, chain, TABLE[:1], end=END, limits=limits(20), beam_size=2, patience=patience)
        counts.append(len(candidates))
    assert counts == [2, 4]


def test_what_does_not_end_is_a_candidate_as_well() -> None:
    endless = TABLE.index_fill(1, torch.tensor([END]), float("-inf"))
    chain = Chain(endless)
    (candidates,) = beam_search(chain, chain, endless[:1], end=END, limits=limits(3), beam_size=2)
    assert candidates[0].tokens == [1, 2, 0]
    assert len(candidates) == 2


def test_the_context_is_copied_only_where_rows_come_or_go() -> None:
    endless = TABLE.index_fill(1, torch.tensor([END]), float("-inf"))
    chain = Chain(endless)
    beam_search(chain, chain, endless[[0, 1]], end=END, limits=limits(4, 3), beam_size=2)
    assert [context for _, context in chain.reordered] == [True, False, True]
    assert [len(index) for index, _ in chain.reordered] == [4, 4, 2]
    assert chain.reordered[0][0] == [0, 0, 1, 1]


def test_the_most_likely_for_its_length() -> None:
    short, long = Generated([1], -1.0), Generated([1, 2, 1, 2], -2.0)
    assert most_likely([short, long]) is long
    assert most_likely([short, long], length_penalty=0.0) is short
    assert most_likely([Generated([], -0.5)]) == Generated([], -0.5)
