"""Recorded episodes for tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tasks.dt.episodes import Episode


def arrays(lengths: Sequence[int], *, timeouts: Sequence[int] = (), **changes: Any) -> dict[str, np.ndarray]:
    """Random episodes of five observed numbers and two acted ones; those at `timeouts` end by time."""
    random = np.random.default_rng(0)
    steps = sum(lengths)
    ends = np.cumsum(lengths) - 1
    late = np.zeros(steps, dtype=bool)
    late[[ends[index] for index in timeouts]] = True
    terminals = np.zeros(steps, dtype=bool)
    terminals[ends] = True
    return {
        "observations": random.normal(size=(steps, 5)).astype(np.float32),
        "actions": random.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "rewards": random.uniform(0, 2, steps).astype(np.float32),
        "terminals": terminals & ~late,
        "timeouts": late,
        **changes,
    }


def write_npz(path: Path, lengths: Sequence[int], **changes: Any) -> Path:
    """A file of D4RL's form."""
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **arrays(lengths, **changes))
    return path


def write_hdf5(path: Path, lengths: Sequence[int]) -> Path:
    """The same in HDF5, with a group beside it, as D4RL's files have."""
    with h5py.File(path, "w") as file:
        for name, values in arrays(lengths).items():
            file[name] = values
        file["infos/qpos"] = np.zeros(3)
    return path


def episode(rewards: Sequence[float], *, name: str = "one", discrete: bool = False) -> Episode:
    """An episode whose observations tell the step."""
    steps = len(rewards)
    actions = np.arange(steps) % 2 if discrete else np.linspace(-1, 1, 2 * steps).reshape(steps, 2)
    observations = np.stack([np.arange(steps), np.ones(steps), np.zeros(steps)], axis=1).astype(np.float32)
    return Episode(name, observations, actions, np.array(rewards, dtype=np.float64))
