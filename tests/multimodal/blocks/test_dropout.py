"""Dropout by 16 random bits a number."""

import pytest
import torch
from torch import nn

from multimodal.blocks.dropout import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_share_and_scale(rate: float, dtype: torch.dtype) -> None:
    x = torch.ones(500, 401, dtype=dtype)
    y = Dropout(rate)(x)
    kept = y != 0
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs(kept.float().mean().item() - (1 - rate)) < 4 * deviation + 2**-16
    scale = torch.tensor(1 / (1 - rate), dtype=dtype)
    torch.testing.assert_close(y[kept], scale.expand(int(kept.sum())), rtol=2e-4, atol=0)
    for axis in (0, 1):  # no row, column or lane of the bits is favoured
        share = kept.float().mean(axis)
        assert (share - (1 - rate)).abs().max() < 6 * (rate * (1 - rate) / x.shape[axis]) ** 0.5
    lanes = kept.flatten()[: x.numel() // 4 * 4].view(-1, 4).float()
    assert (lanes.mean(0) - (1 - rate)).abs().max() < 5 * 2 * deviation
    assert (torch.corrcoef(lanes.T) - torch.eye(4)).abs().max() < 5 * 2 * x.numel() ** -0.5


def test_gradient_is_that_of_the_mask() -> None:
    x = torch.rand(7, 5).add(1).requires_grad_()
    y = Dropout(0.3)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / x.detach())


def test_a_restored_generator_repeats_the_mask() -> None:
    dropout, x = Dropout(0.3), torch.ones(1000)
    state = torch.get_rng_state()
    first, second = dropout(x), dropout(x)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)


def test_where_nothing_or_all_is_dropped() -> None:
    x = torch.randn(3, 4)
    assert Dropout(0.1).eval()(x) is x
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(3, 4))
    assert Dropout(0.2)(torch.empty(0, 4)).shape == (0, 4)
    assert isinstance(Dropout(0.2), nn.Dropout)
