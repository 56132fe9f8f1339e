"""Recorded episodes, checked one by one, and what is measured of them.

T steps of an episode
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Episode(NamedTuple):
    """What was seen, done and got in T steps that end where the episode ended."""

    name: str
    """What it is called in errors."""
    observations: np.ndarray
    """Before each step, [T, ...]."""
    actions: np.ndarray
    """[T, A], or whole numbers [T]."""
    rewards: np.ndarray
    """Float64 [T]."""

    @property
    def total(self) -> float:
        """The return."""
        return float(self.rewards.sum())


class Recorded(NamedTuple):
    """A data set: its episodes, and what it says of their environment, None where it does not."""

    episodes: list[Episode]
    environment: str | None = None
    action_dim: int | None = None
    action_low: tuple[float, ...] | None = None
    action_high: tuple[float, ...] | None = None
    reference_returns: tuple[float, float] | None = None
    return_scale: float | None = None


def checked(name: str, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> Episode:
    """An episode; ValueError, which names it, where its numbers are not finite or its lengths do not agree."""
    lengths = {"observations": len(observations), "actions": len(actions), "rewards": len(rewards)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{name}: {', '.join(f'{n} {kind}' for kind, n in lengths.items())}, expected as many of each")
    if not len(rewards):
        raise ValueError(f"{name}: no step in it, expected at least one")
    for kind, values in (("observations", observations), ("actions", actions), ("rewards", rewards)):
        if values.dtype.kind not in "fiub":
            raise ValueError(f"{name}: {kind} of type {values.dtype}, expected numbers")
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            raise ValueError(f"{name}: {kind} of step {int(bad.argmax())} are not finite, expected numbers")
    if observations.ndim not in (2, 4) or rewards.ndim != 1 or actions.ndim not in (1, 2):
        shapes = f"observations {observations.shape}, actions {actions.shape}, rewards {rewards.shape}"
        raise ValueError(
            f"{name}: {shapes}, expected observations [T, S] or [T, C, H, W], actions [T] or [T, A], rewards [T]"
        )
    if actions.ndim == 1 and actions.dtype.kind == "f":
        actions = actions[:, None]
    if actions.ndim == 1 and actions.min() < 0:
        raise ValueError(f"{name}: action {actions.min()}, expected whole numbers from 0, or vectors")
    return Episode(name, observations, actions, rewards.astype(np.float64))


def same_shapes(episodes: Sequence[Episode]) -> None:
    """ValueError, which names an episode, unless all have states and actions of one kind."""
    first = episodes[0]
    for one in episodes:
        for kind in ("observations", "actions"):
            a, b = getattr(first, kind), getattr(one, kind)
            if a.shape[1:] != b.shape[1:] or (a.ndim == 1 and a.dtype.kind != b.dtype.kind):
                raise ValueError(
                    f"{one.name}: {kind} of shape {b.shape[1:]}, expected {a.shape[1:]} as in {first.name}"
                )


def best(episodes: Sequence[Episode], share: float) -> list[Episode]:
    """The episodes of the highest returns that make up a share of all steps, at least one, in their order.

    %BC learns from these alone (Chen et al. 2021, section 5.1).
    """
    if share >= 1:
        return list(episodes)
    wanted = share * sum(len(one.rewards) for one in episodes)
    chosen: set[int] = set()
    steps = 0
    for index in sorted(range(len(episodes)), key=lambda index: -episodes[index].total):
        if chosen and steps + len(episodes[index].rewards) > wanted:
            break
        chosen.add(index)
        steps += len(episodes[index].rewards)
    return [one for index, one in enumerate(episodes) if index in chosen]


def returns_to_go(rewards: np.ndarray, *, delayed: bool = False) -> np.ndarray:
    """The sum of the rewards from each step to the end, [T]; delayed = that of all of them at every step."""
    if delayed:
        return np.full(len(rewards), rewards.sum())
    return rewards[::-1].cumsum()[::-1]


def statistics(episodes: Iterable[Episode]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each number of a state over all steps, so that one that never changes is divided by 1e-6.

    As in the authors' code.
    """
    states = np.concatenate([one.observations for one in episodes]).astype(np.float64)
    return tuple(states.mean(axis=0).tolist()), tuple((states.std(axis=0) + 1e-6).tolist())
