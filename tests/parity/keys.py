"""Published weights under this suite's names, and what "equal" means here."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Table = Mapping[str, str | tuple[str, ...]]
"""Published module -> ours, within one block; a tuple splits a fused projection into equal parts."""


def qkv(attention: str) -> tuple[str, ...]:
    """What a fused query, key and value projection is split into."""
    return tuple(f"{attention}.{part}_proj" for part in "qkv")


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5: max|a - b| <= 1e-5 · max(1, max|b|)."""
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= 1e-5 * max(1.0, expected.abs().max().item()), f"differs by {difference:.1e}"


def randomize(module: nn.Module) -> nn.Module:
    """Move every parameter off its initial value, so that no two norms or biases are alike; in eval mode."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def to_blocks(state: Mapping[str, Tensor], layers: str, table: Table, *, transposed: bool = False) -> dict[str, Tensor]:
    """The blocks' weights (or gradients) of a state dict whose layer i lies under `<layers>.<i>.`.

    A layer's module that the table lacks is an error, so nothing published is left out unseen. `transposed` is for
    Conv1D, which stores [in, out].
    """
    renamed = {}
    for key, tensor in state.items():
        if not key.startswith(f"{layers}."):
            continue
        index, name = key.removeprefix(f"{layers}.").split(".", 1)
        module, kind = name.replace("in_proj_", "in_proj.").rsplit(".", 1)
        targets = table[module]
        targets = (targets,) if isinstance(targets, str) else targets
        value = tensor.T if transposed and tensor.dim() == 2 else tensor
        for target, part in zip(targets, value.chunk(len(targets)), strict=True):
            renamed[f"blocks.{index}.{target}.{kind}"] = part
    return renamed


def final_norm(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The stack's final norm, published under `name`."""
    return {f"norm.{kind}": state[f"{name}.{kind}"] for kind in ("weight", "bias") if f"{name}.{kind}" in state}


def backward_alike(actual: Tensor, expected: Tensor) -> None:
    """Propagate the same random gradient back from two outputs."""
    gradient = torch.randn_like(expected)
    actual.backward(gradient)
    expected.backward(gradient)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, by the parameter's name."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: nn.Module, expected: Mapping[str, Tensor]) -> None:
    """Every parameter of `ours` has the expected gradient."""
    actual = gradients(ours)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient)


def assert_same_initialisation(ours: nn.Module, published: Mapping[str, Tensor]) -> None:
    """Freshly built modules draw every parameter alike: the same constant, or the same spread and bound."""
    drawn = ours.state_dict()
    assert drawn.keys() == published.keys()
    for name, expected in published.items():
        actual, constant = drawn[name], expected.std() == 0
        if constant:
            assert actual.equal(expected), name
            continue
        tolerance = 0.03 if expected.dim() > 1 else 0.25  # a bias has few numbers
        assert abs(actual.std() / expected.std() - 1) < tolerance, name
        uniform = expected.abs().max() < 2 * expected.std()
        assert uniform == (actual.abs().max() < 2 * actual.std()), name
