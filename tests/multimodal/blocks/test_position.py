"""Positions: formulas, and what each kind promises about distance."""

import math

import pytest
import torch
from torch import Tensor

from multimodal.attention.rope import RopeLayout
from multimodal.blocks import LearnedPosition, RotaryPosition, Stack, StackConfig, resize_grid, sine_2d, sinusoid
from multimodal.blocks.position import SinusoidLayout
from tests.parity.keys import assert_close

SINUSOIDS = pytest.mark.parametrize("layout", ["interleaved", "half", "whisper"])
ROTARIES = pytest.mark.parametrize("layout", ["half", "interleaved"])


@SINUSOIDS
def test_sinusoid_formula(layout: SinusoidLayout) -> None:
    """Element by element, in double precision."""
    table, dim = sinusoid(20, 12, layout), 12
    for position, channel in ((0, 0), (3, 1), (19, 4), (7, 11)):
        pair, is_cosine = divmod(channel, 2) if layout == "interleaved" else (channel % 6, channel // 6)
        angle = position / 10000 ** (pair / (5 if layout == "whisper" else 6))
        expected = math.cos(angle) if is_cosine else math.sin(angle)
        assert table[position, channel].item() == pytest.approx(expected, abs=1e-5)
    assert table.shape == (20, dim)


@SINUSOIDS
def test_sinusoid_shifts_by_a_linear_map(layout: SinusoidLayout) -> None:
    """ "Attention Is All You Need", section 3.5: PE[t + k] is one linear function of PE[t], whatever t."""
    table, shift = sinusoid(200, 8, layout).double(), 7
    matrix = torch.linalg.lstsq(table[:100], table[shift : 100 + shift]).solution
    assert (table[100 : 200 - shift] @ matrix - table[100 + shift :]).abs().max() < 1e-3


@pytest.mark.parametrize("offset", [0, 1000])
@ROTARIES
def test_rotary_scores_depend_on_distance_alone(layout: RopeLayout, offset: int) -> None:
    """The same query and key at all positions: the scores are constant along diagonals, and wherever one starts."""
    q, k = (torch.randn(1, 1, 1, 16).expand(-1, -1, 9, -1) for _ in range(2))
    rotary = RotaryPosition(16, layout=layout)

    def scores(start: int) -> Tensor:
        rope = rotary(9, start)
        return (rope.turn_query(q) @ rope.turn_key(k).transpose(-2, -1))[0, 0]

    actual = scores(offset)
    assert (actual - scores(0)).abs().max() < 1e-3
    for distance in range(-8, 9):
        diagonal = actual.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-3
    assert scores(0).std() > 0.1


@ROTARIES
def test_rotary_keeps_norms(layout: RopeLayout) -> None:
    q = torch.randn(2, 3, 9, 16)
    assert_close(RotaryPosition(16, layout=layout)(9, 5).turn_query(q).norm(dim=-1), q.norm(dim=-1))


@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_rotary_angles_stay_float32(how: str) -> None:
    """At position 4096 an angle in bf16 would be off by radians."""
    stack = Stack(StackConfig(embed_dim=64, depth=1, num_heads=1, rope="half"))
    if how == "cast":
        stack.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        rope = stack.rotary(1, 4096)
        cos, sin = rope.query
        x = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16)
        turned = rope.turn_query(x)
    angle = 4096 * 10000 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos[0, :32] - angle.cos()).abs().max() < 1e-3
    assert turned.dtype == torch.bfloat16


def test_sine_2d_of_a_padded_image() -> None:
    """Real pixels have the positions they would have without the padding."""
    whole = sine_2d(torch.ones(1, 3, 5, dtype=torch.bool), 8).unflatten(1, (3, 5))
    valid = torch.zeros(2, 4, 7, dtype=torch.bool)
    valid[0, :3, :5] = True
    padded = sine_2d(valid, 8).unflatten(1, (4, 7))
    assert_close(padded[:1, :3, :5], whole)
    assert padded.isfinite().all()
    y, x = whole[0, ..., :4], whole[0, ..., 4:]
    assert (y == y[:, :1]).all()  # the first half tells the row alone, the second the column alone
    assert (x == x[:1]).all()
    assert y[:, 0, 0].tolist() == pytest.approx([math.sin(2 * math.pi * row / 3) for row in (1, 2, 3)], abs=1e-5)


def test_resize_grid() -> None:
    """The prefix is kept, a linear ramp stays one, a rectangle keeps its orientation, and the dtype is kept."""
    prefix = torch.randn(2, 4)
    ramp = torch.arange(6.0)[:, None].expand(6, 8).reshape(48, 1).expand(48, 4)  # the row, for a grid of 6 x 8
    resized = resize_grid(torch.cat([prefix, ramp]), (6, 8), (12, 4), prefix=2)
    assert resized[:2].equal(prefix)
    rows = resized[2:].unflatten(0, (12, 4))
    assert (rows - rows[:, :1, :1]).abs().max() < 1e-5
    assert rows[4:8, 0, 0].diff().tolist() == pytest.approx([0.5] * 3, abs=0.05)
    assert resize_grid(ramp.bfloat16(), (6, 8), (3, 4)).dtype == torch.bfloat16
    assert resize_grid(ramp[None], (6, 8), (6, 8)).equal(ramp[None])


def test_resize_grid_to_every_size() -> None:
    """No size loses a row to rounding."""
    position = torch.randn(1 + 14 * 14, 2)
    for side in range(1, 40):
        assert resize_grid(position, (14, 14), (side, 41 - side), prefix=1).shape == (1 + side * (41 - side), 2)


def test_learned_position() -> None:
    position = LearnedPosition(6, 4)
    assert position(2, 3).equal(position.weight[3:5])
    with pytest.raises(ValueError, match="positions up to 7 asked of a table of 6"):
        position(2, 5)


def test_wrong_widths() -> None:
    with pytest.raises(ValueError, match="dim is 5, expected an even number"):
        sinusoid(3, 5)
    with pytest.raises(ValueError, match="dim is 6, expected a multiple of 4"):
        sine_2d(torch.ones(1, 2, 2, dtype=torch.bool), 6)
    with pytest.raises(ValueError, match="even head_dim, found 5"):
        RotaryPosition(5)
    with pytest.raises(ValueError, match="has 12 rows, expected 1 \\+ 3 x 4"):
        resize_grid(torch.zeros(12, 4), (3, 4), (2, 2), prefix=1)
