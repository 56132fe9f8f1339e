"""How a Decision Transformer is fed."""

import torch

from multimodal.models.decision_transformer import DecisionTransformerConfig
from tasks.registry import Example


def example(config: DecisionTransformerConfig, batch_size: int) -> Example:
    """Windows of noise from the starts of episodes, without padding; actions [B, T, A].

    T is free. A policy reads the last step's action; what that step holds as its own action does not matter.
    """
    steps = min(4 + batch_size, config.max_episode_length)
    shape = (batch_size, steps)
    if config.discrete:
        actions = torch.randint(config.action_dim, shape)
    else:
        actions = torch.rand(*shape, config.action_dim) * 2 - 1
    inputs = {
        "state": torch.randn(*shape, *config.state_shape),
        "action": actions,
        "timestep": torch.arange(steps).repeat(batch_size, 1),
    }
    if config.returns:
        inputs["return"] = torch.rand(shape)
    return Example(inputs, ("predicted_action",), {name: {1: ("steps", 1)} for name in inputs})
