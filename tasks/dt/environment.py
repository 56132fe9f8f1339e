"""Acting in gymnasium's environments: several episodes at once, each ended by its own environment."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from multimodal.models.decision_transformer import DecisionTransformerConfig
from tasks.dt.policy import Policy
from tasks.errors import one_line

Environment = gymnasium.Env[Any, Any]


class Outcome(NamedTuple):
    """How an episode went."""

    total: float
    """The return that was achieved."""
    length: int
    """Its steps."""
    cut: bool
    """Stopped after max_episode_length, before its environment ended it."""


class Result(NamedTuple):
    """What came of asking for a return."""

    target: float | None
    """None for a policy that takes none."""
    outcomes: list[Outcome]

    @property
    def returns(self) -> np.ndarray:
        """What each episode achieved."""
        return np.array([one.total for one in self.outcomes])


def make(name: str | None, config: DecisionTransformerConfig, **options: Any) -> Environment:
    """An environment that suits a model.

    Raises:
        ValueError: there is no name, no such environment, what it needs is not installed, or its spaces are not those
            that the model was trained on.
    """
    if name is None:
        raise ValueError("no environment is known for this model, expected gymnasium's name of one")
    try:
        environment: Environment = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"environment {name!r} cannot be made: {one_line(error)}") from error
    except (AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:  # as its own code fails
        raise ValueError(f"environment {name!r} cannot be made: {type(error).__name__} {one_line(error)}") from error
    try:
        _check_spaces(name, environment, config)
    except ValueError:
        environment.close()
        raise
    return environment


def _check_spaces(name: str, environment: Environment, config: DecisionTransformerConfig) -> None:
    seen, done = environment.observation_space, environment.action_space
    if not isinstance(seen, Box) or seen.shape != config.state_shape:
        raise ValueError(f"environment {name!r}: observations are {seen}, expected those of shape {config.state_shape}")
    if config.discrete:
        fits = isinstance(done, Discrete) and done.n == config.action_dim
        expected = f"{config.action_dim} discrete ones"
    else:
        fits = isinstance(done, Box) and done.shape == (config.action_dim,)
        expected = f"vectors of {config.action_dim} numbers"
    if not fits:
        raise ValueError(f"environment {name!r}: actions are {done}, expected {expected} as the model was trained on")


def roll_out(
    policy: Policy,
    environments: Sequence[Environment],
    targets: Sequence[float] | None,
    seeds: Sequence[int],
    watch: Callable[[Environment], None] | None = None,
) -> list[Outcome]:
    """One episode in each environment, all in step.

    Args:
        policy: what acts.
        environments: one for each episode, such as `make` returns.
        targets: the return that is asked for in each episode; None for a policy without returns.
        seeds: how each environment begins.
        watch: called with the first environment when its episode begins, and after each of its steps.
    """
    firsts = [int(getattr(one.action_space, "start", 0)) for one in environments]
    observations = [one.reset(seed=seed)[0] for one, seed in zip(environments, seeds, strict=True)]
    running, totals, lengths = list(range(len(environments))), [0.0] * len(environments), [0] * len(environments)
    cut: set[int] = set()
    rewards: np.ndarray | None = None
    policy.reset(targets)
    if watch is not None:
        watch(environments[0])
    while running:
        actions = policy.act(np.stack([observations[index] for index in running]), rewards)
        earned, still = [], []
        for row, (index, action) in enumerate(zip(running, actions, strict=True)):
            environment = environments[index]
            action = int(action) + firsts[index] if isinstance(environment.action_space, Discrete) else action
            observations[index], reward, terminated, truncated, _ = environment.step(action)
            totals[index] += float(reward)
            lengths[index] += 1
            earned.append(float(reward))
            if watch is not None and index == 0:
                watch(environment)
            if terminated or truncated:
                continue
            if policy.step >= policy.preprocess.max_episode_length:
                cut.add(index)
                continue
            still.append(row)
        if len(still) < len(running):
            running = [running[row] for row in still]
            policy.keep(still)
        rewards = np.array([earned[row] for row in still])
    return [Outcome(total, length, i in cut) for i, (total, length) in enumerate(zip(totals, lengths, strict=True))]
