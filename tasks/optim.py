"""What the optimizer sees: which parameters, in which groups, at which learning rates."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def freeze(model: nn.Module, patterns: str | list[str]) -> None:
    """Leave the parameters whose names match a pattern as they are; ValueError for a pattern that matches none."""
    parameters = dict(model.named_parameters())
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matching:
            parts = sorted({name.split(".")[0] for name in parameters})
            raise ValueError(f"--freeze {pattern} matches no parameter; their names begin with {', '.join(parts)}")
        for name in matching:
            parameters[name].requires_grad_(False)


def parameter_groups(
    model: Any,
    *,
    lr: float,
    weight_decay: float,
    layer_decay: float = 1.0,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
) -> list[dict[str, Any]]:
    """Trainable parameters by weight decay and, with `layer_decay` below 1, by layer.

    Norms, biases and layer scales (all with fewer than two dimensions) take no weight decay, nor do the parameters that
    `model.no_weight_decay()` names. Layer i of n learns at lr · layer_decay^(n − 1 − i), as in BEiT (Bao et al. 2021);
    the model says which layer a parameter belongs to by `layer_id(name)` and `num_layers`. `lr_scale(name)` is one more
    factor on a parameter's rate.
    """
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    if layer_decay != 1 and not hasattr(model, "layer_id"):
        raise ValueError(f"layer_decay is {layer_decay}, but {type(model).__name__} does not say what its layers are")
    groups: dict[tuple[int, bool, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = lr_scale(name)
        decays = parameter.ndim >= 2 and name not in exempt
        depth_left = model.num_layers - 1 - model.layer_id(name) if layer_decay != 1 else 0
        group = {
            "params": [],
            "lr": scale * lr * layer_decay**depth_left,
            "weight_decay": weight_decay if decays else 0.0,
        }
        groups.setdefault((depth_left, decays, scale), group)["params"].append(parameter)
    if not groups:
        raise ValueError("no parameter is left to train: all are frozen")
    return list(groups.values())


def warmup_cosine(total_steps: int, warmup: float, final: float = 0.0) -> Callable[[int], float]:
    """The factor on the learning rate at each optimizer step: linear up, then half a cosine down to `final`.

    Args:
        total_steps: optimizer steps of the whole run.
        warmup: steps of warm-up; below 1, a share of `total_steps`.
        final: the factor at the last step.
    """
    warmup_steps = round(warmup * total_steps) if warmup < 1 else int(warmup)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return factor
