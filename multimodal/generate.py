"""Sequences from a model that tells the next token: greedy, sampled, by beam search.

A model is a step: it takes the tokens that follow the cached ones, and returns the logits of what comes next. What may
be generated is decided by rules, which change logits.

R rows (sequences that are being generated), B batch (prompts), V vocabulary, n tokens generated so far
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Cache(Protocol):
    """What `multimodal.attention.StackCache` is: the state of a step, which follows its rows."""

    def reorder(self, index: Tensor, *, context: bool = True) -> None: ...


Step = Callable[[Tensor, Any], Tensor]
"""`step(tokens, cache)`: int64 [R, 1] that follow the cached ones -> logits [R, V] of the next."""
Rule = Callable[[Tensor, Tensor], Tensor]
"""`rule(logits, generated)`: logits [R, V], which it may change in place, and int64 [R, n] -> logits [R, V]."""


class Generated(NamedTuple):
    """One sequence."""

    tokens: list[int]
    """Without prompt and end token."""
    log_prob: float
    """Sum of the logarithms of all its tokens' probabilities, under the rules; the end token's included."""

    @property
    def mean_log_prob(self) -> float:
        """`log_prob` over the number of tokens, the end token counted."""
        return self.log_prob / (len(self.tokens) + 1)


def _apply(rules: Sequence[Rule], logits: Tensor, generated: Tensor) -> Tensor:
    logits = logits.float()
    for rule in rules:
        logits = rule(logits, generated)
    return logits


def generate(
    step: Step,
    cache: Cache,
    logits: Tensor,
    *,
    end: int,
    limits: Tensor,
    temperature: float = 0.0,
    rules: Sequence[Rule] = (),
    generator: torch.Generator | None = None,
) -> list[Generated]:
    """The most likely next token each time, or one that is drawn; rows that have ended are computed no further.

    Args:
        step: the model.
        cache: holds the prompts; used up.
        logits: [B, V], what the step returned for the prompts.
        end: the token that ends a sequence.
        limits: int64 [B], most tokens of each sequence.
        temperature: 0 = the most likely token; else logits are divided by it and a token is drawn.
        rules: applied in this order, on float32.
        generator: for drawing.

    Returns:
        A sequence for each prompt; one that reached its limit has no end token, nor its probability.
    """
    rows = torch.arange(len(logits), device=logits.device)
    log_probs = torch.zeros(len(logits), device=logits.device)
    generated = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    limits = limits.to(logits.device)
    found: dict[int, Generated] = {}
    while True:
        logits = _apply(rules, logits, generated)
        if temperature > 0:
            probabilities = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(probabilities, 1, generator=generator)
        else:
            chosen = logits.argmax(-1, keepdim=True)
        log_probs = log_probs + logits.gather(1, chosen)[:, 0] - logits.logsumexp(-1)
        generated = torch.cat([generated, chosen], dim=1)
        ended = chosen[:, 0] == end
        over = ended | (limits[rows] <= generated.shape[1])
        if over.any():
            for at in over.nonzero()[:, 0].tolist():
                tokens = generated[at].tolist()
                found[int(rows[at])] = Generated(tokens[:-1] if ended[at] else tokens, float(log_probs[at]))
            going = (~over).nonzero()[:, 0]
            if not len(going):
                return [found[row] for row in range(len(found))]
            rows, log_probs, generated = rows[going], log_probs[going], generated[going]
            cache.reorder(going)
        logits = step(generated[:, -1:], cache)


class _Beam:
    """The search for one prompt."""

    def __init__(self, size: int, wanted: int) -> None:
        self.size = size
        self.wanted = wanted
        self.going: list[Generated] = [Generated([], 0.0)]
        self.ended: list[Generated] = []

    def extend(self, values: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], end: int) -> list[int]:
        """Go on from each sequence by its best tokens; returns from which sequence each of the new ones stems."""
        candidates = [
            (one.log_prob + value, source, token)
            for source, one in enumerate(self.going)
            for value, token in zip(values[source], tokens[source], strict=True)
        ]
        going, sources = [], []
        for log_prob, source, token in sorted(candidates, key=lambda candidate: -candidate[0]):
            before = self.going[source].tokens
            if token == end:
                if len(self.ended) < self.wanted:
                    self.ended.append(Generated(before, log_prob))
            else:
                going.append(Generated([*before, token], log_prob))
                sources.append(source)
                if len(going) == self.size:
                    break
        self.going = going
        return sources

    @property
    def done(self) -> bool:
        return len(self.ended) >= self.wanted

    def found(self) -> list[Generated]:
        """What ended, and where that is too little the best of what did not."""
        missing = max(0, self.size - len(self.ended))
        return self.ended + sorted(self.going, key=lambda one: -one.log_prob)[:missing]


def beam_search(
    step: Step,
    cache: Cache,
    logits: Tensor,
    *,
    end: int,
    limits: Tensor,
    beam_size: int,
    patience: float = 1.0,
    rules: Sequence[Rule] = (),
) -> list[list[Generated]]:
    """Beam search that goes on until `beam_size` · `patience` sequences have ended ("Beam Decoding with Controlled
    Patience", Kasai et al. 2022).

    Args:
        step, cache, logits, end, rules: see `generate`.
        limits: int64 [B], most tokens of each sequence.
        beam_size: sequences that are followed at a time.
        patience: how long to wait for better ones.

    Returns:
        For each prompt its candidates: those that ended, and where these are fewer than `beam_size` the best others.
    """
    beams = [_Beam(beam_size, max(1, round(beam_size * patience))) for _ in logits]
    most = limits.tolist()
    active = list(range(len(beams)))
    generated = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    while True:
        log_probs = F.log_softmax(_apply(rules, logits, generated), dim=-1)
        best = log_probs.topk(min(beam_size + 1, log_probs.shape[-1]), dim=-1)
        values, tokens = best.values.tolist(), best.indices.tolist()
        first, index, following = 0, [], []
        for at in active:
            beam = beams[at]
            last = first + len(beam.going)
            sources = beam.extend(values[first:last], tokens[first:last], end)
            if not beam.done and beam.going and len(beam.going[0].tokens) < most[at]:
                following.append(at)
                index += [first + source for source in sources]
            first = last
        if not following:
            return [beam.found() for beam in beams]
        # Rows of one prompt share its context; only where rows come or go is that to be copied as well.
        cache.reorder(torch.tensor(index, device=logits.device), context=len(index) != first or following != active)
        active = following
        rows = [one.tokens for at in active for one in beams[at].going]
        generated = torch.tensor(rows, device=logits.device)
        logits = step(generated[:, -1:], cache)


def most_likely(candidates: Sequence[Generated], length_penalty: float | None = None) -> Generated:
    """The sequence of the highest probability for its length.

    Args:
        candidates: at least one.
        length_penalty: None = the mean over its tokens; else over ((5 + length) / 6) to this power ("Google's Neural
            Machine Translation System", Wu et al. 2016, section 7).
    """

    def score(one: Generated) -> float:
        length = len(one.tokens)
        return one.log_prob / (max(length, 1) if length_penalty is None else ((5 + length) / 6) ** length_penalty)

    return max(candidates, key=score)
