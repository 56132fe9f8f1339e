"""What a detection decoder starts from: where tokens lie, which boxes are proposed, and where each head looks."""

import math

import pytest
import torch
from torch import Tensor, nn

from multimodal.blocks.queries import (
    OUTSIDE,
    PRIOR,
    SIDE,
    BoxHead,
    BoxQueries,
    ClassHead,
    GaussianModulation,
    LearnedQueries,
    Noised,
    Proposals,
    Proposer,
    token_places,
)

DIM, HEADS = 16, 4
KINDS = [(None, False), (3, True), (4, False)]
"""`num_outputs` and `sigmoid` of queries: learned boxes, and proposed ones with either score."""


def box_queries(count: int, num_outputs: int | None, sigmoid: bool, *, depth: int = 0, classes: int = 0) -> BoxQueries:
    return BoxQueries(
        count, DIM, num_heads=HEADS, depth=depth, num_classes=classes, num_outputs=num_outputs, sigmoid=sigmoid
    )


def proposals(scores: list[float], *, sigmoid: bool = True, outside: tuple[int, ...] = ()) -> Proposals:
    """Of one image: token i scores so much for class 0, and finds a box whose centre is (i + 1) / 10."""
    count = len(scores)
    logits = torch.full((1, count, 2 if sigmoid else 3), -5.0)
    logits[0, :, 0] = torch.tensor(scores)
    places = torch.rand(1, count, 2)
    places[0, list(outside)] = OUTSIDE
    return Proposals(logits, torch.arange(1.0, count + 1).div(10)[None, :, None].expand(-1, -1, 4), places)


def best(found: Proposals, count: int, *, sigmoid: bool = True) -> list[int]:
    """Which tokens are proposed."""
    boxes = Proposer(DIM, found.logits.shape[-1], sigmoid=sigmoid).best(found, count)
    return (boxes[0, :, 0] * 10 - 1).round().int().tolist()


def test_places_are_centres_as_shares_of_the_real_part() -> None:
    real = torch.zeros(2, 3, 5, dtype=torch.bool)
    real[0, :2, :4] = True
    real[1] = True
    places = token_places(real).view(2, 3, 5, 2)
    for row in range(3):
        for column in range(5):
            inside = row < 2 and column < 4
            expected = ((column + 0.5) / 4, (row + 0.5) / 2) if inside else (OUTSIDE, OUTSIDE)
            assert places[0, row, column].tolist() == pytest.approx(expected)
            assert places[1, row, column].tolist() == pytest.approx(((column + 0.5) / 5, (row + 0.5) / 3))


def test_places_of_an_image_without_a_real_pixel_are_finite() -> None:
    assert (token_places(torch.zeros(1, 2, 2, dtype=torch.bool)) == OUTSIDE).all()


def shaped(spread: float = 0.5) -> GaussianModulation:
    """A modulation as if trained."""
    modulation = GaussianModulation(DIM, HEADS)
    nn.init.normal_(modulation.to_shape.weight, std=spread / DIM**0.5)
    return modulation


@torch.no_grad()
def test_modulation_is_the_logarithm_of_a_gaussian() -> None:
    modulation, x = shaped(), torch.randn(2, 3, DIM)
    boxes = torch.rand(2, 3, 4) * 0.8 + 0.1
    boxes[0, 0, 2:] = 0.001  # narrower than the least
    places = token_places(torch.ones(2, 4, 5, dtype=torch.bool))
    bias = modulation(x, boxes, places)
    assert bias.shape == (2, HEADS, 3, 20)
    shape = 2 * torch.tanh(modulation.to_shape(x).double().view(2, 3, HEADS, 4) / 2)
    box, place = boxes.double(), places.double()
    expected = torch.zeros(2, HEADS, 3, 20, dtype=torch.float64)
    for axis in range(2):
        side = box[:, :, None, 2 + axis]
        centre = box[:, :, None, axis] + shape[..., axis] * side  # [B, Q, H]
        deviation = (side / 2).clamp(min=modulation.LEAST) / shape[..., 2 + axis].exp()
        distance = place[:, None, None, :, axis] - centre[..., None]
        expected -= (distance.square() / (2 * deviation[..., None].square())).transpose(1, 2)
    torch.testing.assert_close(bias.double(), expected, rtol=1e-4, atol=2e-3)


@torch.no_grad()
def test_heads_begin_on_a_circle_around_the_centre() -> None:
    modulation = GaussianModulation(DIM, HEADS)
    box = torch.tensor([[[0.5, 0.5, 0.4, 0.2]]])
    grid = token_places(torch.ones(1, 200, 200, dtype=torch.bool))
    bias = modulation(torch.randn(1, 1, DIM), box, grid)[0, :, 0]
    for head, place in enumerate(grid[0, bias.argmax(-1)]):
        angle = 2 * math.pi * head / HEADS
        offset = modulation.RADIUS * torch.tensor([0.4 * math.cos(angle), 0.2 * math.sin(angle)])
        assert torch.allclose(place, 0.5 + offset, atol=0.005)


@torch.no_grad()
def test_modulation_stays_exact_under_autocast() -> None:
    modulation, x, boxes = shaped(), torch.randn(1, 3, DIM), torch.rand(1, 3, 4)
    places = token_places(torch.ones(1, 6, 6, dtype=torch.bool))
    plain = modulation(x, boxes, places)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = modulation(x, boxes, places)
    assert narrow.dtype == x.dtype
    assert torch.isfinite(narrow).all()
    assert (narrow - plain).abs().max() <= 0.05 * plain.abs().max()


def test_modulation_cannot_narrow_without_end() -> None:
    """At a high learning rate its weights grow; an unbounded width then gives gradients that are not finite."""
    modulation = GaussianModulation(DIM, HEADS)
    with torch.no_grad():
        modulation.to_shape.weight.normal_(std=100.0)
    x = torch.randn(1, 3, DIM, requires_grad=True)
    places = token_places(torch.ones(1, 6, 6, dtype=torch.bool))
    bias = modulation(x, torch.rand(1, 3, 4), places)
    (grad,) = torch.autograd.grad(bias.softmax(-1).square().sum(), x)
    assert grad.isfinite().all()
    deviation = modulation.LEAST * math.exp(-modulation.MOST)
    assert bias.abs().max() <= (1 + modulation.MOST) ** 2 / deviation**2


def test_the_best_tokens_are_proposed_in_order() -> None:
    assert best(proposals([0.1, 3.0, -1.0, 2.0]), 3) == [1, 3, 0]


def test_no_object_is_no_class_to_be_proposed_for() -> None:
    found = proposals([0.1, 3.0, 2.0], sigmoid=False)
    found.logits[0, 0, -1] = 9.0
    assert best(found, 2, sigmoid=False) == [1, 2]


def test_padding_is_proposed_only_after_every_real_token() -> None:
    found = proposals([9.0, 1.0, 9.0, 2.0, 9.0], outside=(0, 2, 4))
    assert best(found, 2) == [3, 1]
    assert best(found, 3)[:2] == [3, 1]


def test_a_tiny_image_proposes_its_tokens_and_then_its_middle() -> None:
    found = proposals([0.0, 2.0, 1.0])
    assert best(found, 3) == [1, 2, 0]
    boxes = Proposer(DIM, found.logits.shape[-1], sigmoid=True).best(found, 7)
    assert torch.equal(boxes[0, 3:], torch.full((4, 4), 0.5))


@pytest.mark.parametrize(("num_outputs", "sigmoid"), KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_queries_start_from_as_many_boxes_whatever_the_image(
    num_outputs: int | None, sigmoid: bool, tokens: int
) -> None:
    queries = box_queries(5, num_outputs, sigmoid, depth=2)
    places = token_places(torch.ones(2, 1, tokens, dtype=torch.bool))
    x, boxes, found = queries.start(torch.randn(2, tokens, DIM), places, None)
    assert (x.shape, boxes.shape) == ((2, 5, DIM), (2, 5, 4))
    assert ((boxes > 0) & (boxes < 1)).all()
    assert (found is None) == (num_outputs is None)
    guide = queries.guide(1, x, boxes, places)
    assert guide["pos"].shape == x.shape
    assert guide["context_bias"].shape == (2, HEADS, 5, tokens)


def test_boxes_give_proposals_no_gradient_and_their_losses_do() -> None:
    queries = box_queries(5, 3, True)
    memory = torch.randn(2, 8, DIM, requires_grad=True)
    places = token_places(torch.ones(2, 2, 4, dtype=torch.bool))
    _, boxes, found = queries.start(memory, places, None)
    assert found is not None
    assert not boxes.requires_grad
    (found.logits.sum() + found.boxes.sum()).backward()
    assert queries.proposer is not None
    assert all(parameter.grad is not None for parameter in queries.proposer.parameters())
    assert memory.grad is not None


def test_learned_boxes_take_a_gradient_from_the_first_layer() -> None:
    queries = box_queries(5, None, True)
    places = token_places(torch.ones(1, 2, 2, dtype=torch.bool))
    x, boxes, _ = queries.start(torch.randn(1, 4, DIM), places, None)
    queries.guide(0, x, boxes, places)["pos"].sum().backward()
    assert queries.boxes is not None
    assert queries.boxes.grad is not None
    assert queries.boxes.grad.abs().sum() > 0


@torch.no_grad()
def test_noised_boxes_come_first_with_the_vector_of_their_class() -> None:
    queries = box_queries(5, None, True, classes=3)
    places = token_places(torch.ones(2, 2, 2, dtype=torch.bool))
    labels, boxes = torch.tensor([[2, 0], [1, 1]]), torch.rand(2, 2, 4)
    noised = Noised(labels, boxes, torch.ones(2, 2, dtype=torch.bool), torch.ones(1, 1, 7, 7, dtype=torch.bool))
    x, started, _ = queries.start(torch.randn(2, 4, DIM), places, noised)
    assert queries.labels is not None
    assert torch.equal(x[:, :2], queries.labels.weight[labels])
    assert torch.equal(started[:, :2], boxes)
    own, plain, _ = queries.start(torch.randn(2, 4, DIM), places, None)
    assert torch.equal(x[:, 2:], own)
    assert torch.equal(started[:, 2:], plain)


def test_learned_queries_start_from_nothing() -> None:
    queries = LearnedQueries(5, DIM)
    places = token_places(torch.ones(2, 2, 2, dtype=torch.bool))
    x, boxes, found = queries.start(torch.randn(2, 4, DIM), places, None)
    assert boxes is found is None
    assert torch.equal(x, torch.zeros(2, 5, DIM))
    assert torch.equal(queries.guide(0, x, None, places)["pos"], queries.embed.weight[None])


@torch.no_grad()
def test_a_box_head_that_refines_begins_with_no_change() -> None:
    x, boxes = torch.randn(2, 5, DIM), torch.rand(2, 5, 4) * 0.98 + 0.01
    torch.testing.assert_close(BoxHead(DIM, refines=True)(x, boxes), boxes)
    started = BoxHead(DIM, refines=False)(x)
    assert started.shape == (2, 5, 4)
    assert started.std() > 0


@torch.no_grad()
@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_a_box_at_the_edge_of_the_image_can_be_refined(edge: float) -> None:
    refined = BoxHead(DIM, refines=True)(torch.randn(1, 1, DIM), torch.full((1, 1, 4), edge))
    assert torch.allclose(refined, torch.full((1, 1, 4), edge), atol=2e-5)


@torch.no_grad()
def test_sigmoid_scores_begin_low() -> None:
    x = torch.zeros(1, DIM)
    assert torch.allclose(ClassHead(DIM, 3, sigmoid=True)(x).sigmoid(), torch.tensor(PRIOR))
    assert ClassHead(DIM, 3, sigmoid=False)(x).sigmoid().min() > 0.3


@torch.no_grad()
def test_proposals_begin_as_squares_where_their_tokens_are() -> None:
    places = token_places(torch.ones(1, 3, 3, dtype=torch.bool))
    found: Proposals = Proposer(DIM, 3, sigmoid=True)(torch.randn(1, 9, DIM), places)
    expected: Tensor = torch.cat([places, torch.full_like(places, SIDE)], -1)
    torch.testing.assert_close(found.boxes, expected)
    assert torch.equal(found.places, places)
