"""Episodes of CartPole-v1 (Barto, Sutton & Anderson 1983) by a mixture of controllers: the embedded data.

Most controllers hold the pole up for a while, each for its own, and then let it fall, so that returns of all sizes are
there, and how one gets them can be seen. Others hold it to the end, and a few tumble. Each moves the cart at a slow
speed of its own, and acts at random now and then. An episode is a function of its number alone.
"""

import math
from typing import NamedTuple

import gymnasium
import numpy as np

from tasks.dt.episodes import Episode, Recorded

ENVIRONMENT = "CartPole-v1"
GAINS = (1.0, 1.7, 20.0, 4.0)
"""On the errors of place, speed, angle and angular speed; the sum's sign is the side to which the cart is pushed."""
_STEP = 0.02  # seconds
_SERIES = 1983
_RETURN_SCALE = 50.0
"""Of the size of the returns to go at which something else is to be done: a smaller one is told apart from none."""


def record(count: int) -> Recorded:
    """The first `count` episodes."""
    environment = gymnasium.make(ENVIRONMENT, disable_env_checker=True)
    episodes = [_episode(environment, index) for index in range(count)]
    environment.close()
    return Recorded(episodes, ENVIRONMENT, action_dim=2, return_scale=_RETURN_SCALE)


class Controller(NamedTuple):
    """How an episode is played."""

    steps: float
    """After which everything is done the wrong way round."""
    noise: float
    """How often a push is to a random side."""
    speed: float
    """At which the cart is to go, per second; the track ends 2.4 from its middle."""


def _controller(random: np.random.Generator) -> Controller:
    kind, speed = random.random(), random.uniform(-0.1, 0.1)
    if kind < 0.1:
        return Controller(math.inf, random.uniform(0.5, 1.0), speed)
    steps = math.inf if kind < 0.25 else random.uniform(10, 500)
    return Controller(steps, random.uniform(0.0, 0.2), speed)


def _episode(environment: gymnasium.Env, index: int) -> Episode:
    random = np.random.default_rng((_SERIES, index))
    controller = _controller(random)
    observation, _ = environment.reset(seed=index)
    start, ended = float(observation[0]), False
    observations: list[np.ndarray] = []
    actions: list[int] = []
    rewards: list[float] = []
    while not ended:
        place, velocity, angle, turning = observation.tolist()
        way = start + controller.speed * _STEP * len(actions)
        errors = (place - way, velocity - controller.speed, angle, turning)
        right = sum(gain * error for gain, error in zip(GAINS, errors, strict=True)) > 0
        action = int(right == (len(actions) < controller.steps))
        if random.random() < controller.noise:
            action = int(random.integers(2))
        observations.append(observation)
        actions.append(action)
        observation, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    return Episode(f"{ENVIRONMENT} episode {index}", np.stack(observations), np.array(actions), np.array(rewards))
