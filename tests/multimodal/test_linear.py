"""The fused Linear equals the plain one, and leaves alone what is more than a Linear."""

import copy
import pickle

import pytest
import torch
from torch import nn

from multimodal.blocks.mlp import QuickGELU
from multimodal.linear import PackedWeight, linear

ACTIVATIONS = [nn.Identity(), nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), QuickGELU()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the fused calls that are made."""
    made: list[str] = []
    fused = torch.ops.mkldnn._linear_pointwise

    def record(*arguments: object) -> torch.Tensor:
        made.append(str(arguments[3]))
        return fused(*arguments)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", record)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_fused_equals_plain(
    dtype: torch.dtype, tolerance: float, activation: nn.Module, bias: bool, calls: list[str]
) -> None:
    layer = nn.Linear(24, 40, bias=bias)
    x = torch.randn(2, 100, 24)
    expected = activation(layer(x)).detach()
    with torch.no_grad():
        found = linear(layer.to(dtype), x.to(dtype), activation)
    assert found.dtype == dtype
    assert (found.float() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    plain = isinstance(activation, QuickGELU) or (dtype == torch.float32 and isinstance(activation, nn.Identity))
    assert len(calls) == (not plain)


def test_training_is_never_fused(calls: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(200, 24)
    linear(layer, x, nn.GELU()).sum().backward()
    assert not calls
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


class Adapter(nn.Linear):
    """A Linear that is more than one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    return layer


@pytest.mark.parametrize("make", [lambda: Adapter(24, 40), lambda: hooked(nn.Linear(24, 40))], ids=["subclass", "hook"])
def test_what_is_more_than_a_linear_is_called(make, calls: list[str]) -> None:
    layer, x = make(), torch.randn(200, 24)
    with torch.no_grad():
        found = linear(layer, x, nn.ReLU())
        plain = torch.relu(nn.functional.linear(x, layer.weight, layer.bias) + 1)
    assert torch.equal(found, plain)
    assert not calls


def test_autocast_is_left_to_torch(calls: list[str]) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(200, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(layer, x, nn.GELU()).dtype == torch.bfloat16
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_follows_its_weight(dtype: torch.dtype) -> None:
    weight, packed = nn.Parameter(torch.randn(50, 16).to(dtype)), PackedWeight()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    with torch.no_grad():
        for rows in (1, 8, 3):
            x = torch.randn(rows, 1, 16).to(dtype)
            for change in (0.0, 1.0):
                weight.add_(change)
                expected = torch.nn.functional.linear(x, weight)
                assert (packed(x, weight) - expected).abs().max() <= tolerance * expected.abs().max()
    assert packed._packed is not None
    assert copy.deepcopy(packed)._packed is None
    assert pickle.loads(pickle.dumps(packed))._packed is None


def test_a_packed_weight_learns_and_casts() -> None:
    weight, packed, x = nn.Parameter(torch.randn(5, 4)), PackedWeight(), torch.randn(2, 4)
    packed(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert packed(x, weight).dtype == torch.bfloat16
    assert packed._packed is None


def test_a_weight_that_a_fused_optimizer_changed_is_packed_anew() -> None:
    """Such a step leaves the version of a tensor as it was."""
    weight, packed, x = nn.Parameter(torch.randn(50, 16)), PackedWeight(), torch.randn(2, 16)
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=True)
    for _ in range(2):
        with torch.no_grad():
            assert (packed(x, weight) - torch.nn.functional.linear(x, weight)).abs().max() <= 1e-5 * 16
        packed(x, weight).square().sum().backward()
        optimizer.step()
