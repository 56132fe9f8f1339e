"""Data sets of Minari (Farama Foundation): a name among those in Minari's folder, or the folder of one."""

from pathlib import Path
from typing import Any

import minari
import numpy as np
from gymnasium.spaces import Box, Discrete
from minari.dataset.minari_dataset import EpisodeData, MinariDataset

from tasks.dt.episodes import Episode, Recorded, checked
from tasks.errors import one_line


def read(root: str) -> Recorded:
    """The episodes of a data set, with what it says of its environment.

    Raises:
        ValueError: no such data set, spaces that a Decision Transformer does not take, or a wrong episode, by name.
    """
    try:
        data = MinariDataset(Path(root, "data")) if Path(root).is_dir() else minari.load_dataset(root)
        told = dict(data.storage.metadata)
    except Exception as error:  # as many kinds as there are ways to store a data set
        raise ValueError(
            f"data root {root}: no data set of Minari's ({one_line(error)}), expected the folder of one, or the name "
            "of one in Minari's folder (minari download NAME)"
        ) from error
    actions, observations = data.action_space, data.observation_space
    if not isinstance(observations, Box) or not isinstance(actions, Box | Discrete):
        raise ValueError(
            f"data root {root}: observations are {type(observations).__name__} and actions {type(actions).__name__}, "
            "expected Box, and Box or Discrete"
        )
    bounds: dict[str, Any] = {}
    if isinstance(actions, Discrete):
        bounds["action_dim"] = int(actions.n)
    elif np.isfinite(actions.low).all() and np.isfinite(actions.high).all():
        bounds = {"action_low": tuple(actions.low.tolist()), "action_high": tuple(actions.high.tolist())}
    first = 0 if not isinstance(actions, Discrete) else int(actions.start)
    episodes = [_episode(f"{told.get('dataset_id', root)} episode {one.id}", one, first) for one in data]
    references: list[Any] = [told.get(name) for name in ("ref_min_score", "ref_max_score")]
    spec = data.env_spec
    return Recorded(
        episodes,
        spec.id if spec is not None else None,
        reference_returns=None if None in references else (float(references[0]), float(references[1])),
        **bounds,
    )


def _episode(name: str, data: EpisodeData, first_action: int) -> Episode:
    steps = len(data.rewards)
    if len(data.observations) != steps + 1:
        raise ValueError(
            f"{name}: {len(data.observations)} observations for {steps} steps, expected {steps + 1}: "
            "also what was seen at the end"
        )
    ends = np.asarray(data.terminations, dtype=bool) | np.asarray(data.truncations, dtype=bool)
    if len(ends) != steps or ends[:-1].any():
        raise ValueError(f"{name}: terminated or truncated before its last step, expected at its end alone")
    if not np.isfinite(np.asarray(data.observations[-1], dtype=np.float64)).all():
        raise ValueError(f"{name}: observations of step {steps} are not finite, expected numbers")
    actions = np.asarray(data.actions)
    return checked(
        name,
        np.asarray(data.observations[:-1]),
        actions - first_action if first_action else actions,
        np.asarray(data.rewards),
    )
