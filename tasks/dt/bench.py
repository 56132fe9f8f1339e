"""What the benchmark measures of the Decision Transformer."""

from typing import Any

import numpy as np
import torch
from torch import nn

from multimodal.linear import lay_out_for_few_rows
from multimodal.models.decision_transformer import DecisionTransformerConfig
from tasks.dt.policy import Policy
from tasks.dt.preprocess import TrajectoryPreprocess
from tasks.workload import Data, Setting, Subject, Workload, default_recipe, model_for, training

BATCH, ENVIRONMENTS = 64, 16
ACTIONS = 60
TARGET, SCALE = 3600.0, 1000.0
_CARTPOLE: dict[str, Any] = {"state_shape": (4,), "action_dim": 2, "discrete": True, "max_episode_length": 500}
_HOPPER: dict[str, Any] = {"state_shape": (11,), "action_dim": 3}


def workloads(size: str) -> list[Workload]:
    """A training step of 64 windows, and acting in one environment and in 16 at once."""
    if size == "tiny":
        config, options = default_recipe("dt", **_CARTPOLE)
        return _works("Decision Transformer, default recipe", config, options)
    return _works("Decision Transformer 3 × 128, K = 20", DecisionTransformerConfig(**_HOPPER), {})


def _works(model: str, config: DecisionTransformerConfig, options: dict[str, Any]) -> list[Workload]:
    def windows() -> Data:
        shape = (BATCH, config.context_length)
        actions = torch.rand(*shape, config.action_dim) * 2 - 1
        first = torch.randint(config.max_episode_length - config.context_length, (BATCH, 1))
        return {
            "state": torch.randn(*shape, *config.state_shape),
            "action": torch.randint(config.action_dim, shape) if config.discrete else actions,
            "timestep": torch.arange(config.context_length) + first,
            "return": torch.rand(shape) * TARGET / SCALE,
            "valid": torch.ones(shape, dtype=torch.bool),
        }

    def train(setting: Setting, data: Data) -> Subject:
        return training("dt", config, setting, data, **options)

    def act(setting: Setting, data: Data) -> Subject:
        transformer = model_for("dt", config, setting)
        lay_out_for_few_rows(transformer)
        policy = Policy(transformer, _preprocess(config))  # type: ignore[arg-type]
        if setting.compile:
            policy.compile()
        return Subject(run=lambda: roll_out(policy, data), model=transformer)

    def acting(name: str, environments: int, actions: int) -> Workload:
        return Workload(
            model=model,
            name=name,
            batch=environments,
            data=lambda: _episodes(config, environments, actions),
            ours=act,
            config=config,
            facts={"target": TARGET, "return_scale": SCALE},
            unit="actions",
            items=environments * actions,
            reads=lambda transformer: [part for part in transformer.children() if not isinstance(part, nn.Embedding)],
            steps=actions,
        )

    early = config.context_length
    return [
        Workload(
            model=model,
            name="train",
            batch=BATCH,
            data=windows,
            ours=train,
            config=config,
            trains=True,
            clip=0.25,
            lr=1e-4,
            unit="windows",
        ),
        acting(f"{ACTIONS} actions", 1, ACTIONS),
        acting(f"first {early} actions", 1, early),
        acting(f"{ACTIONS} actions", ENVIRONMENTS, ACTIONS),
    ]


def _episodes(config: DecisionTransformerConfig, environments: int, actions: int) -> Data:
    """What environments answer, whatever is done in them: observations and rewards [actions, environments, …]."""
    shape = (actions, environments)
    return {"observations": torch.randn(*shape, *config.state_shape).numpy(), "rewards": torch.rand(shape).numpy()}


def _preprocess(config: DecisionTransformerConfig) -> TrajectoryPreprocess:
    (size,) = config.state_shape
    return TrajectoryPreprocess(
        state_mean=(0.0,) * size,
        state_std=(1.0,) * size,
        action_low=None,
        action_high=None,
        return_scale=SCALE,
        return_range=(0.0, TARGET),
        max_episode_length=config.max_episode_length,
    )


def roll_out(policy: Any, data: Data) -> np.ndarray:
    """The actions of anything that acts as `Policy` does, [actions, environments, …]."""
    observations, rewards = data["observations"], data["rewards"]
    policy.reset(np.full(observations.shape[1], TARGET))
    found = [policy.act(row, rewards[step - 1] if step else None) for step, row in enumerate(observations)]
    return np.stack(found)
