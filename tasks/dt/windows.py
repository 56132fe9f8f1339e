"""Episodes as windows of steps, gathered a whole batch at a time.

B batch, T steps of a window, M steps of all episodes
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.data import Key
from tasks.dt.episodes import Episode, returns_to_go
from tasks.dt.preprocess import TrajectoryPreprocess


class Windows(Dataset[Any]):
    """Windows of up to `length` steps of one episode, by the key of their first step.

    In training every step begins a window, so that an episode comes up as often as it is long, as in the paper; in
    evaluation windows do not overlap, so that each step is measured once. A window that the episode's end cuts short is
    padded behind, where a causal model does not look.
    """

    def __init__(
        self, episodes: Sequence[Episode], preprocess: TrajectoryPreprocess, length: int, *, training: bool
    ) -> None:
        lengths = np.array([len(one.rewards) for one in episodes])
        self.preprocess = preprocess
        self.length = length
        self.observations = np.concatenate([one.observations for one in episodes])
        actions = np.concatenate([one.actions for one in episodes])
        self.actions = preprocess.to_model(actions) if actions.ndim == 2 else actions.astype(np.int64)
        to_go = [returns_to_go(one.rewards, delayed=preprocess.delayed) for one in episodes]
        self.returns = (np.concatenate(to_go) / preprocess.return_scale).astype(np.float32)
        self.timesteps = np.concatenate([np.arange(n) for n in lengths])
        self.ends = np.repeat(lengths.cumsum(), lengths)
        """For each step, where its episode ends."""
        starts = np.arange(len(self.ends))
        self.starts = starts if training else starts[self.timesteps % length == 0]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the steps and their order."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.observations, self.actions, self.returns, self.ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __getitem__(self, key: Key | int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([key]).items()}

    def __getitems__(self, keys: Sequence[Key | int]) -> dict[str, Tensor]:
        """The windows of a batch, each `[B, T, ...]`: how a loader asks for them."""
        indices = [key[1] if isinstance(key, tuple) else key for key in keys]
        at = self.starts[indices][:, None] + np.arange(self.length)  # [B, T]
        ends = self.ends[self.starts[indices]][:, None]
        valid = at < ends
        at = np.minimum(at, ends - 1)
        return {
            "state": torch.from_numpy(self.preprocess.states(self.observations[at])),
            "action": torch.from_numpy(self.actions[at]),
            "timestep": torch.from_numpy(self.timesteps[at]),
            "return": torch.from_numpy(self.returns[at]),
            "valid": torch.from_numpy(valid),
        }
