"""Each init scheme against the published formula; tests/parity compares with what published modules themselves draw."""

import math

import pytest
from torch import Tensor

from multimodal.blocks import Stack, StackConfig
from multimodal.blocks.init import InitScheme

WIDTH, DEPTH = 256, 2
ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


def drawn(scheme: InitScheme, *, gated: bool = False) -> dict[str, Tensor]:
    """The last block's matrices and biases, by name."""
    config = StackConfig(embed_dim=WIDTH, depth=DEPTH, num_heads=4, init=scheme, gated=gated)
    block = Stack(config, context_dim=WIDTH).blocks[-1]
    return {name: p.detach() for name, p in block.named_parameters() if "norm" not in name}


FORMULAS: dict[InitScheme, dict[str, float]] = {
    "vit": dict.fromkeys(("in", "out_proj", "fc1", "fc2"), 0.02),
    "whisper": dict.fromkeys(("in", "out_proj", "fc1", "fc2"), 0.02),
    "gpt2": {"in": 0.02, "fc1": 0.02, "out_proj": 0.02 / math.sqrt(2 * DEPTH), "fc2": 0.02 / math.sqrt(2 * DEPTH)},
    "clip": {
        "in": WIDTH**-0.5,
        "fc1": (2 * WIDTH) ** -0.5,
        "out_proj": WIDTH**-0.5 * (2 * DEPTH) ** -0.5,
        "fc2": WIDTH**-0.5 * (2 * DEPTH) ** -0.5,
    },
    # Xavier: a uniform bound √(6 / (fan in + fan out)) is a std of √(2 / (fan in + fan out)).
    "detr": {
        "in": math.sqrt(2 / (WIDTH + 3 * WIDTH)),
        "out_proj": math.sqrt(2 / (2 * WIDTH)),
        "fc1": math.sqrt(2 / (5 * WIDTH)),
        "fc2": math.sqrt(2 / (5 * WIDTH)),
    },
}


@pytest.mark.parametrize("scheme", FORMULAS)
def test_formula(scheme: InitScheme) -> None:
    """The std of every matrix, a gate's among them, and which biases start at zero."""
    for name, tensor in drawn(scheme, gated=True).items():
        module, kind = name.split(".")[-2:]
        if kind == "weight":
            role = "in" if module in ATTENTION[:3] else "fc1" if module == "gate" else module
            assert tensor.std().item() == pytest.approx(FORMULAS[scheme][role], rel=0.02), name
            assert abs(tensor.mean()) < tensor.std() / 50, name
        else:
            kept = scheme in ("clip", "detr") and module in ("fc1", "fc2", "gate")
            assert tensor.any() == kept, name


def test_norms_keep_ones_and_zeros() -> None:
    for name, parameter in Stack(StackConfig(embed_dim=8, depth=1, num_heads=2, qk_norm=True)).named_parameters():
        if "norm" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name
