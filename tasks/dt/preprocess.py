"""What belongs to a policy besides its weights: how its numbers are scaled, and for which environment it is."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Self

import numpy as np

Pair = tuple[float, float]
Row = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TrajectoryPreprocess:
    """Scaling between an environment's numbers and the model's.

    Args:
        state_mean: subtracted from a state; None = it is an image, of which 255 is 1.
        state_std: what it is then divided by.
        action_low: the environment's number for the model's -1, for each of an action's; None = it is the same.
        action_high: that for 1.
        return_scale: what returns to go are divided by.
        return_range: lowest and highest return of an episode that was learned from.
        max_episode_length: steps of the longest episode that the model has timesteps for.
        delayed: rewards are learned from as if they came at the end of an episode alone.
        environment: gymnasium's name of it; None = not known.
        reference_returns: the returns that stand for 0 and for 100 in a normalised score; None = there are none.
    """

    state_mean: Row | None
    state_std: Row | None
    action_low: Row | None
    action_high: Row | None
    return_scale: float
    return_range: Pair
    max_episode_length: int
    delayed: bool = False
    environment: str | None = None
    reference_returns: Pair | None = None

    def __post_init__(self) -> None:
        for low, high in ((self.state_mean, self.state_std), (self.action_low, self.action_high)):
            if (low is None) != (high is None) or (low is not None and high is not None and len(low) != len(high)):
                raise ValueError("state_mean and state_std, action_low and action_high: expected as many of each")
        for name, right, expected in (
            ("state_std", min(self.state_std or (1.0,)) > 0, "numbers above 0"),
            ("action_high", self._has_bounds_apart(), f"more than action_low {self.action_low}"),
            ("return_range", len(self.return_range) == 2, "the lowest and the highest return"),
            ("return_scale", self.return_scale > 0, "more than 0"),
            ("max_episode_length", self.max_episode_length >= 1, "at least 1"),
            ("reference_returns", not self.reference_returns or len(set(self.reference_returns)) == 2, "two returns"),
        ):
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

    def _has_bounds_apart(self) -> bool:
        """In single precision, in which actions are scaled."""
        pairs = zip(self.action_low or (), self.action_high or (), strict=True)
        return all(np.float32(low) < np.float32(high) for low, high in pairs)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> Self:
        """The reverse of `to_dict`; ValueError, beginning with `where`, for anything else."""
        known = {field.name: field for field in fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise ValueError(f"{where}: its preprocessing has {unknown[0]!r}, expected {', '.join(known)}")
        if missing := [name for name, one in known.items() if one.default is MISSING and name not in data]:
            raise ValueError(f"{where}: its preprocessing lacks {missing[0]}")
        try:
            values: dict[str, Any] = {
                name: tuple(map(float, value)) if isinstance(value, list | tuple) else value
                for name, value in data.items()
            }
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: its preprocessing cannot be used ({error})") from error

    def states(self, observations: np.ndarray) -> np.ndarray:
        """Observations [..., S] or [..., C, H, W] as the model takes them, float32."""
        if self.state_mean is None:
            return observations.astype(np.float32) / 255
        return (observations.astype(np.float32) - _row(self.state_mean)) / _row(self.state_std)

    def to_model(self, actions: np.ndarray) -> np.ndarray:
        """Continuous actions [..., A] of the environment as the model takes them, float32."""
        actions = actions.astype(np.float32)
        if self.action_low is None:
            return actions
        low, high = _row(self.action_low), _row(self.action_high)
        return 2 * (actions - low) / (high - low) - 1

    def to_environment(self, actions: np.ndarray) -> np.ndarray:
        """The reverse of `to_model`, within the bounds."""
        if self.action_low is None:
            return actions
        low, high = _row(self.action_low), _row(self.action_high)
        return np.clip(low + (actions + 1) / 2 * (high - low), low, high)

    def normalized_score(self, value: float) -> float | None:
        """A return as a share of the way from the first reference to the second, times 100; None without them."""
        if self.reference_returns is None:
            return None
        low, high = self.reference_returns
        return 100 * (value - low) / (high - low)


def _row(values: Row | None) -> np.ndarray:
    return np.array(values, dtype=np.float32)
