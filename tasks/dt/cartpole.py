"""Episodes of CartPole-v1 (Barto, Sutton & Anderson 1983) by a mixture of controllers: the embedded data.

Most controllers hold the pole up and walk the cart out of the track, each at its own speed, so that returns of all sizes
are there, and how one gets them can be seen. Others stand still, and a few tumble. All of them act at random now and
then. An episode is a function of its number alone.
"""

import gymnasium
import numpy as np

from tasks.dt.episodes import Episode, Recorded

ENVIRONMENT = "CartPole-v1"
GAINS = (1.0, 1.7, 20.0, 4.0)
"""On the errors of place, speed, angle and angular speed; the sum's sign is the side to which the cart is pushed."""
_STEP = 0.02  # seconds
_SERIES = 1983


def record(count: int) -> Recorded:
    """The first `count` episodes."""
    environment = gymnasium.make(ENVIRONMENT, disable_env_checker=True)
    episodes = [_episode(environment, index) for index in range(count)]
    environment.close()
    return Recorded(episodes, ENVIRONMENT, action_dim=2)


def _controller(random: np.random.Generator) -> tuple[float, float]:
    """Speed in units of the track a second, and how often it acts at random."""
    kind = random.random()
    if kind < 0.15:
        return 0.0, random.uniform(0.5, 1.0)
    if kind < 0.35:
        return 0.0, random.uniform(0.0, 0.3)
    steps = random.uniform(80, 600)  # that it will take to the end of the track, nearly
    return float(random.choice((-1, 1))) * 120 / (steps - 25), random.uniform(0.0, 0.3)


def _episode(environment: gymnasium.Env, index: int) -> Episode:  # type: ignore[type-arg]
    random = np.random.default_rng((_SERIES, index))
    speed, noise = _controller(random)
    observation, _ = environment.reset(seed=index)
    start, ended = float(observation[0]), False
    observations, actions, rewards = [], [], []
    while not ended:
        place, velocity, angle, turning = observation.tolist()
        errors = (place - start - speed * _STEP * len(actions), velocity - speed, angle, turning)
        action = int(sum(gain * error for gain, error in zip(GAINS, errors, strict=True)) > 0)
        if random.random() < noise:
            action = int(random.integers(2))
        observations.append(observation)
        actions.append(action)
        observation, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    return Episode(f"{ENVIRONMENT} episode {index}", np.stack(observations), np.array(actions), np.array(rewards))
