"""Which query answers for which object, also where outputs or objects are degenerate."""

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torchvision.ops import generalized_box_iou

from multimodal.blocks.queries import OUTSIDE, token_places
from multimodal.models.detr import DETROutput
from tasks.detr.matcher import HungarianMatcher, Pairs, Scores, Targets, giou, nearest_tokens, pairwise_giou, xyxy


def boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], -1)


def targets(labels: list[list[int]], crowd: list[tuple[int, int]] = ()) -> Targets:  # type: ignore[assignment]
    """Objects at random places; `crowd` lists image and object."""
    values = torch.tensor(labels, dtype=torch.int64)
    crowds = torch.zeros_like(values, dtype=torch.bool)
    for image, index in crowd:
        crowds[image, index] = True
    return Targets(values, boxes(*values.shape), crowds)


def rows(pairs: Pairs) -> list[tuple[int, ...]]:
    return [tuple(row) for row in torch.stack(pairs, 1).tolist()]


def test_overlap_is_torchvisions() -> None:
    a, b = xyxy(boxes(7)), xyxy(boxes(5))
    torch.testing.assert_close(pairwise_giou(a, b), generalized_box_iou(a, b))
    torch.testing.assert_close(giou(a[:5], b), generalized_box_iou(a, b)[:5].diagonal())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.5, 0.5, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0), 0.0),
        ((0.2, 0.2, 0.0, 0.0), (0.8, 0.8, 0.0, 0.0), -1.0),
        ((0.2, 0.5, 0.0, 0.0), (0.8, 0.5, 0.0, 0.0), 0.0),
        ((0.5, 0.5, 0.0, 0.4), (0.5, 0.5, 0.0, 0.4), 0.0),
        ((0.5, 0.5, 0.0, 0.0), (0.5, 0.5, 0.2, 0.2), 0.0),
    ],
)
def test_overlap_of_boxes_without_area(a: tuple[float, ...], b: tuple[float, ...], expected: float) -> None:
    first = torch.tensor(a, requires_grad=True)
    value = giou(xyxy(first), xyxy(torch.tensor(b)))
    assert value.item() == pytest.approx(expected)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_matching_is_of_least_cost(scores: Scores) -> None:
    output = DETROutput(torch.randn(2, 2, 4, 3), boxes(2, 2, 4))
    wanted = targets([[0, 1, 1], [1, -1, 0]])
    matcher = HungarianMatcher(scores)
    pairs, cost = matcher(output, wanted), matcher.cost(output, wanted)
    assert cost.shape == (2, 2, 4, 3)
    for layer in range(2):
        for image, present in enumerate(([0, 1, 2], [0, 2])):
            chosen = (pairs.layer == layer) & (pairs.image == image)
            assert sorted(pairs.target[chosen].tolist()) == present
            found = cost[layer, image, pairs.query[chosen], pairs.target[chosen]].sum().item()
            every = permutations(range(4), len(present))
            least = min(sum(cost[layer, image, q, t].item() for q, t in zip(p, present, strict=True)) for p in every)
            assert found == pytest.approx(least, abs=1e-5)


def test_neither_padding_nor_crowds_are_matched() -> None:
    output = DETROutput(torch.randn(1, 3, 5, 4), boxes(1, 3, 5))
    wanted = targets([[-1, 2, 1], [0, 1, 2], [-1, -1, -1]], crowd=[(1, 0), (1, 2)])
    pairs = HungarianMatcher()(output, wanted)
    assert {(image, target) for _, image, _, target in rows(pairs)} == {(0, 1), (0, 2), (1, 1)}
    assert len(pairs.layer) == 3


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_more_objects_than_queries(scores: Scores) -> None:
    output = DETROutput(torch.randn(2, 1, 3, 4), boxes(2, 1, 3))
    pairs = HungarianMatcher(scores)(output, targets([[0, 1, 2, 0, 1]]))
    for layer in range(2):
        assert sorted(pairs.query[pairs.layer == layer].tolist()) == [0, 1, 2]
        assert len(set(pairs.target[pairs.layer == layer].tolist())) == 3


def test_no_object_is_no_pair() -> None:
    pairs = HungarianMatcher()(DETROutput(torch.randn(2, 2, 3, 4), boxes(2, 2, 3)), targets([[-1], [-1]]))
    assert all(part.shape == (0,) and part.dtype == torch.int64 for part in pairs)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_outputs_that_are_not_finite_are_matched_all_the_same(scores: Scores, value: float) -> None:
    """That the loss is not finite is told by whoever adds it up."""
    output = DETROutput(torch.full((1, 1, 3, 4), value), torch.full((1, 1, 3, 4), value))
    pairs = HungarianMatcher(scores)(output, targets([[0, 1]]))
    assert sorted(pairs.target.tolist()) == [0, 1]
    assert len(set(pairs.query.tolist())) == 2


def test_one_query_that_is_not_finite_is_the_last_to_be_chosen() -> None:
    output = DETROutput(torch.randn(1, 1, 3, 4), boxes(1, 1, 3))
    output.logits[0, 0, 1] = float("nan")
    assert 1 not in HungarianMatcher()(output, targets([[0, 1]])).query


def grid(*real: tuple[int, int], size: tuple[int, int] = (3, 4)) -> Tensor:
    """Places of maps of which so many rows and columns are real."""
    valid = torch.zeros(len(real), *size, dtype=torch.bool)
    for image, (height, width) in enumerate(real):
        valid[image, :height, :width] = True
    return token_places(valid)


def at(centres: list[list[tuple[float, float]]], sides: list[list[float]]) -> Targets:
    places, lengths = torch.tensor(centres), torch.tensor(sides)[..., None].expand(-1, -1, 2)
    labels = torch.zeros(places.shape[:2], dtype=torch.int64)
    return Targets(labels, torch.cat([places, lengths], -1), torch.zeros_like(labels, dtype=torch.bool))


def test_each_object_teaches_the_token_nearest_to_it() -> None:
    places, wanted = grid((30, 40), (20, 10), size=(30, 40)), targets([[0, 1], [2, 0]])
    expected = set()
    for image in range(2):
        for target in range(2):
            distance = (places[image].double() - wanted.boxes[image, target, :2].double()).norm(dim=-1)
            expected.add((0, image, int(distance.argmin()), target))
    assert set(rows(nearest_tokens(places, wanted))) == expected
    assert not any(places[image, query, 0] == OUTSIDE for _, image, query, _ in expected)


def test_the_smallest_of_several_objects_keeps_a_token() -> None:
    pairs = nearest_tokens(grid((3, 4)), at([[(0.6, 0.5), (0.62, 0.5), (0.64, 0.5)]], [[0.5, 0.1, 0.3]]))
    assert rows(pairs) == [(0, 0, 6, 1)]


def test_an_object_between_tokens_teaches_all_that_are_nearest() -> None:
    pairs = nearest_tokens(grid((2, 2), size=(2, 2)), at([[(0.5, 0.5)]], [[0.2]]))
    assert rows(pairs) == [(0, 0, query, 0) for query in range(4)]


def test_crowds_and_padding_teach_no_token() -> None:
    wanted = targets([[0, -1], [1, 0]], crowd=[(1, 0)])
    assert {(image, target) for _, image, _, target in rows(nearest_tokens(grid((3, 4), (3, 4)), wanted))} == {
        (0, 0),
        (1, 1),
    }
    assert rows(nearest_tokens(grid((3, 4)), targets([[-1]]))) == []
