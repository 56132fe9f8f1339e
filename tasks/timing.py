"""How long something takes: interleaved rounds after a warm-up, medians with ranges."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tasks.workload import Setting, Subject, Workload

PARTS = ("forward", "backward", "optimizer")
"""Of a training step; clipping belongs to the optimizer."""
DOUBTFUL = 0.25
"""A spread of the rounds over their median above which a figure is marked."""
_ROUND = 300.0
"""Milliseconds that the calls of a round last together, at most, where one is faster."""
_LONG = 1500.0
"""A call of so many milliseconds is not slower after another runner's: the first, second and third call of a turn took
1427, 1446 and 1413 ms (a step of ViT-Ti), 1519, 1512 and 1530 (timm's), 2272, 2209 and 2248 (of a light DETR), 2876,
2927 and 2872 (Hugging Face's): medians of four turns on a core that others used as well."""
SLOW = 10_000.0
"""A call of so many milliseconds has warmed up by itself, and three of them are enough."""


class Stopwatch:
    """Moments of a device: by its own events on CUDA, else by the clock once it has done what it was told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """This moment."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._marks.append(event)
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Milliseconds between the marks."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self.device.type != "cuda":
            return [1000 * (later - earlier) for earlier, later in pairs]
        torch.cuda.synchronize(self.device)
        return [earlier.elapsed_time(later) for earlier, later in pairs]


class Runner:
    """A subject's work, call by call."""

    def __init__(self, subject: Subject, work: Workload, setting: Setting) -> None:
        self.subject, self.work, self.setting = subject, work, setting
        self._trained: list[nn.Parameter] = []
        self._optimizer: AdamW | None = None
        if work.trains:
            if subject.model is None:
                raise ValueError(f"{work.name}: nothing to train, expected a subject with a model")
            self._trained = [one for one in subject.model.parameters() if one.requires_grad]
            self._optimizer = AdamW(self._trained, lr=work.lr, fused=True)

    def __call__(self) -> list[float]:
        """One call; the milliseconds of its parts, which are `PARTS` in training."""
        watch = Stopwatch(self.setting.device)
        watch.mark()
        if self._optimizer is None:
            with torch.inference_mode():
                self.subject.run()
            watch.mark()
            return watch.laps()
        loss = self.loss()
        watch.mark()
        loss.backward()
        watch.mark()
        if self.work.clip is not None:
            nn.utils.clip_grad_norm_(self._trained, self.work.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        watch.mark()
        laps = watch.laps()
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()}, expected a finite one")
        return laps

    def loss(self) -> Tensor:
        """The forward pass of a training step."""
        dtype = self.setting.dtype
        low = dtype != torch.float32
        with torch.autocast(self.setting.device.type, dtype) if low else nullcontext():
            loss: Tensor = self.subject.run()
        return loss


@dataclass
class Times:
    """What the rounds of one subject took, in milliseconds of a call."""

    rounds: list[float] = field(default_factory=list)
    """The median call of each round."""
    calls: list[list[float]] = field(default_factory=list)
    """Of each call its parts."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def parts(self) -> list[float]:
        """The median of each part."""
        return [statistics.median(part) for part in zip(*self.calls, strict=True)]

    @property
    def doubtful(self) -> bool:
        """Whether the rounds are too far apart."""
        return (max(self.rounds) - min(self.rounds)) > DOUBTFUL * self.median

    def percentile(self, share: float) -> float | None:
        """Of the calls' lengths; None of too few to tell."""
        if len(self.calls) * min(share, 1 - share) < 1:
            return None
        lengths = sorted(map(sum, self.calls))
        place = share * (len(lengths) - 1)
        low = int(place)
        return lengths[low] + (place - low) * (lengths[min(low + 1, len(lengths) - 1)] - lengths[low])


def trial(runner: Callable[[], list[float]]) -> float:
    """Milliseconds of the fastest of the calls of a round, at least two, after one that warms up.

    Of a long call it is one call, of a slow one the first.
    """
    first = sum(runner())
    if first > SLOW:
        return first
    lengths = [sum(runner())]
    if first <= _LONG:
        lengths += [sum(runner()) for _ in range(max(1, _calls(lengths[0]) - 1))]
    return min(lengths)


def interleave(
    runners: Mapping[str, Callable[[], list[float]]],
    rounds: int,
    *,
    least_calls: int = 1,
    told: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Times]:
    """Rounds in which each takes its turn; who is first changes from round to round.

    In a round each runs once without being counted, since it pays for the memory that the one before gave back; not
    those of long calls, beside which that is little.

    Args:
        runners: by name; a call returns the milliseconds of its parts.
        rounds: how many; at most three of what takes ten seconds a call.
        least_calls: in a round; fast ones are called more often.
        told: is given the seconds that the rounds will take.
    """
    lengths = {}
    for name, runner in runners.items():
        first = sum(runner())
        lengths[name] = first if first > _LONG else sum(runner())
    slow = max(lengths.values()) > SLOW
    rounds = min(rounds, 3) if slow else rounds
    counts = {name: 1 if slow else max(least_calls, _calls(ms)) for name, ms in lengths.items()}
    uncounted = {name: int(not slow and ms <= _LONG) for name, ms in lengths.items()}
    told(rounds * sum(ms * (counts[name] + uncounted[name]) for name, ms in lengths.items()) / 1000)
    times = {name: Times() for name in runners}
    for index in range(rounds):
        for name in _turned(list(runners), index):
            for _ in range(uncounted[name]):
                runners[name]()
            calls = [runners[name]() for _ in range(counts[name])]
            times[name].calls += calls
            times[name].rounds.append(statistics.median(map(sum, calls)))
    return times


def _calls(ms: float) -> int:
    """How often what takes so long is called in a round, at most."""
    return min(20, round(_ROUND / ms))


def _turned(names: Sequence[str], index: int) -> list[str]:
    """The names, another one first each time, and every other time backwards."""
    turn = index % len(names)
    turned = [*names[turn:], *names[:turn]]
    return turned[::-1] if index // len(names) % 2 else turned
