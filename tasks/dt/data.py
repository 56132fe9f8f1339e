"""Recorded episodes: the embedded CartPole, files in D4RL's form, or a data set of Minari's."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import gymnasium
import numpy as np
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import default_collate

from tasks.data import TaskData
from tasks.dt import cartpole, d4rl
from tasks.dt.episodes import Episode, Recorded, best, returns_to_go, same_shapes, statistics
from tasks.dt.preprocess import Pair, TrajectoryPreprocess
from tasks.dt.windows import Windows

DatasetName = Literal["cartpole", "d4rl", "minari"]
REFERENCES: dict[str, Pair] = {
    "Hopper": (-20.272305, 3234.3),
    "HalfCheetah": (-280.178953, 12135.0),
    "Walker2d": (1.629008, 4592.3),
}
"""Returns of a random and of an expert policy by D4RL (Fu et al. 2020), for environments of any version."""


class EpisodeData(TaskData):
    """Windows of recorded episodes: `state`, `action`, `timestep`, `return`, `valid`, each [B, context_length, ...].

    Episodes are held out whole. What is None is found in the training episodes, or in the checkpoint that is started
    from.

    Args:
        dataset: cartpole, by controllers of many kinds; d4rl, files of that form; minari; None = d4rl where there is a
            root, else cartpole.
        root: File, or folder of files, of D4RL's form (.npz, .hdf5); name or folder of a data set of Minari's.
        files: Names of files in root; None = all.
        source: Where people get the data that belong into root; told where root is missing.
        num_episodes: How many episodes of cartpole.
        context_length: Steps of a window.
        top: Share of the training steps that is kept, of the episodes with the highest returns; 0.1 beside
            model.returns false is 10%BC.
        delayed: Learn as if all rewards came at the end of an episode.
        environment: gymnasium's name of the environment in which policies are tried; None = that of the data set.
        state_mean: Subtracted from each number of a state; null for images, which are divided by 255.
        state_std: What it is then divided by.
        action_low: Least of each number of an action, which the model sees as -1; None = that of the data set, and of
            d4rl's -1 where all lie between -1 and 1.
        action_high: The most, likewise.
        return_scale: What returns to go are divided by; None = the largest.
        return_range: Lowest and highest return of a training episode.
        max_episode_length: Steps of the longest episode that the model can tell the time of; None = the longest that
            the data or the environment have.
        reference_returns: Returns that are 0 and 100 in a normalised score; None = those of D4RL or Minari.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: an episode that is not whole, by name; no root where one is needed, or one where there is none to
            give; an episode longer than max_episode_length.
    """

    in_memory = True

    def __init__(  # noqa: PLR0913  each thing that a checkpoint says of a policy is a flag
        self,
        *,
        dataset: DatasetName | None = None,
        root: str | None = None,
        files: list[str] | None = None,
        source: str | None = None,
        num_episodes: int = 400,
        context_length: int,
        top: float = 1.0,
        delayed: bool = False,
        environment: str | None = None,
        state_mean: list[float] | None = None,
        state_std: list[float] | None = None,
        action_low: list[float] | None = None,
        action_high: list[float] | None = None,
        return_scale: float | None = None,
        return_range: tuple[float, float] | None = None,
        max_episode_length: int | None = None,
        reference_returns: tuple[float, float] | None = None,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if not 0 < top <= 1:
            raise ValueError(f"data.top is {top}, expected a share above 0 and up to 1")
        if num_episodes < 1:
            raise ValueError(f"data.num_episodes is {num_episodes}, expected at least 1")
        self.context_length = context_length
        self.max_episode_length = max_episode_length
        self.top = top
        name = dataset or ("cartpole" if root is None else "d4rl")
        self.recorded = _read(name, root, files, source, num_episodes)
        same_shapes(self.recorded.episodes)
        self.environment = environment or self.recorded.environment
        if ":" in (self.environment or ""):  # gymnasium would import what stands before it
            raise ValueError(
                f"data.environment is {self.environment!r}, which names a module to import: neither a config nor a "
                "checkpoint may; to act in it, multimodal rollout dt --environment NAME"
            )
        given = {
            "state_mean": state_mean,
            "state_std": state_std,
            "action_low": action_low,
            "action_high": action_high,
            "return_scale": return_scale,
            "return_range": return_range,
            "max_episode_length": max_episode_length,
            "reference_returns": reference_returns,
        }
        self.preprocess = self._preprocess({name: value for name, value in given.items() if value is not None}, delayed)
        self._check()

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.recorded.episodes[0].observations.shape[1:]

    @property
    def discrete(self) -> bool:
        return self.recorded.episodes[0].actions.ndim == 1

    @property
    def action_dim(self) -> int:
        if not self.discrete:
            return self.recorded.episodes[0].actions.shape[1]
        return self.recorded.action_dim or max(2, 1 + max(int(one.actions.max()) for one in self.recorded.episodes))

    @property
    def longest(self) -> int:
        """Steps of the longest episode that the model is to have timesteps for."""
        return self.preprocess.max_episode_length

    @cached_property
    def _splits(self) -> dict[str, Sequence[Episode]]:
        splits = self.complete({"train": self.recorded.episodes}, lambda episode: None)
        whole = splits["train"]
        splits["train"] = best(whole, self.top)
        for split in ("val", "test"):
            if not splits[split]:
                splits[split] = whole
                rank_zero_warn(
                    f"{len(whole)} episodes are too few to hold some out: the {split} metrics are those of training"
                )
        return splits

    def _preprocess(self, given: dict[str, Any], delayed: bool) -> TrajectoryPreprocess:
        train = self._splits["train"]
        returns = [one.total for one in train]
        largest = max(float(np.abs(returns_to_go(one.rewards, delayed=delayed)).max()) for one in train)
        found: dict[str, Any] = {
            "return_scale": self.recorded.return_scale or largest or 1.0,
            "return_range": (min(returns), max(returns)),
            "max_episode_length": max(self._time_limit(), *(len(one.rewards) for one in self.recorded.episodes), 1),
            "reference_returns": self.recorded.reference_returns
            or REFERENCES.get((self.environment or "").split("-")[0]),
            **dict(zip(("action_low", "action_high"), self._bounds(), strict=True)),
            "state_mean": None,
            "state_std": None,
        }
        if len(self.state_shape) == 1 and not {"state_mean", "state_std"} <= given.keys():
            found |= dict(zip(("state_mean", "state_std"), statistics(train), strict=True))
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in (found | given).items()
        }
        return TrajectoryPreprocess(**values, delayed=delayed, environment=self.environment)

    def _time_limit(self) -> int:
        """Steps after which the environment ends an episode; 0 = it does not, or is not known."""
        try:
            limit = gymnasium.spec(self.environment).max_episode_steps if self.environment else None
        except gymnasium.error.Error:
            return 0
        return limit or 0

    def _bounds(self) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """Of continuous actions; None = between -1 and 1."""
        if self.discrete:
            return None, None
        if self.recorded.action_low is not None:
            return self.recorded.action_low, self.recorded.action_high
        actions = np.concatenate([one.actions for one in self.recorded.episodes])
        low, high = actions.min(axis=0), actions.max(axis=0)
        if low.min() >= -1 and high.max() <= 1:
            return None, None
        rank_zero_warn("the data do not say the bounds of actions, so they are the least and the most in them")
        return tuple(low.tolist()), tuple(np.maximum(high, low + 1e-3 * np.maximum(1, np.abs(low))).tolist())

    def _check(self) -> None:
        """ValueError where the episodes are not such as a checkpoint or a flag says."""
        preprocess = self.preprocess
        for one in self.recorded.episodes:
            if len(one.rewards) > preprocess.max_episode_length:
                raise ValueError(
                    f"{one.name}: {len(one.rewards)} steps, expected at most data.max_episode_length "
                    f"{preprocess.max_episode_length}: a model does not know the time after it"
                )
        self._check_limit()
        sizes = {"state_mean": self.state_shape[0] if len(self.state_shape) == 1 else None}
        sizes["action_low"] = None if self.discrete else self.action_dim
        for name, size in sizes.items():
            values = getattr(preprocess, name)
            if values is not None and len(values) != size:
                raise ValueError(f"data.{name} has {len(values)} values, expected {size or 'null'}")

    def _check_limit(self) -> None:
        """ValueError where an episode goes on after its environment's end: several that nothing divides."""
        limit = self._time_limit()
        for one in self.recorded.episodes if limit and self.max_episode_length is None else ():
            if len(one.rewards) > limit:
                raise ValueError(
                    f"{one.name}: {len(one.rewards)} steps, but {self.environment} ends an episode after {limit}: "
                    "expected data that tell where each ends (timeouts), or data.max_episode_length"
                )

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._describe()
        for split in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ()):
            if split not in self.datasets:
                self.datasets[split] = Windows(
                    self._splits[split], self.preprocess, self.context_length, training=split == "train"
                )

    def _describe(self) -> None:
        train, preprocess = self._splits["train"], self.preprocess
        low, high = preprocess.return_range
        steps = sum(len(one.rewards) for one in train)
        rank_zero_info(
            f"{len(train)} episodes of {steps:,} steps, returns {low:.1f} to {high:.1f}, divided by "
            f"{preprocess.return_scale:g}; environment {preprocess.environment or 'not known'}"
        )

    @staticmethod
    def collate(batch: Any) -> Any:
        """`Windows` gathers a whole batch by itself; what lies between it and the loader may hand over single items."""
        return default_collate(batch) if isinstance(batch, list) else batch


def _read(name: str, root: str | None, files: list[str] | None, source: str | None, count: int) -> Recorded:
    if name == "cartpole":
        if root is not None:
            raise ValueError(f"data.root is {root} and data.dataset cartpole, which needs none: expected one of them")
        if files:
            raise ValueError(
                f"data.files are {', '.join(files)}, but data.root is missing, expected --data.root FOLDER"
            )
        return cartpole.record(count)
    if root is None:
        told = f"; the data come from {source}" if source else ""
        raise ValueError(f"data.root is missing, expected --data.root FOLDER for data.dataset {name}{told}")
    if name == "minari":
        from tasks.dt import minari_data  # half a second, which other data need not wait for

        if files:
            raise ValueError("data.files are files of D4RL's form, which data.dataset minari has none of")
        recorded = minari_data.read(root)
    else:
        recorded = d4rl.read(root, files)
    if not recorded.episodes:
        raise ValueError(f"data root {root}: no episode in it, expected at least one")
    return recorded
