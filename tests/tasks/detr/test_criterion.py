"""The losses against torch's and torchvision's own, without objects, and on crowds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import generalized_box_iou, sigmoid_focal_loss

from multimodal.models.detr import DETROutput
from tasks.detr.criterion import Losses, SetCriterion, cardinality_error, class_error
from tasks.detr.matcher import HungarianMatcher, Pairs, Scores, Targets, xyxy
from tests.tasks.detr.test_matcher import boxes, targets

LAYERS, IMAGES, QUERIES, CLASSES = 2, 2, 6, 3
scored = pytest.mark.parametrize("scores", ["softmax", "sigmoid"])


class Found:
    """Outputs at random, whose gradients can be looked at; boxes come from a sigmoid, as a model's."""

    def __init__(self, scores: Scores, images: int = IMAGES) -> None:
        self.scores = scores
        self.logits = torch.randn(LAYERS, images, QUERIES, CLASSES + (scores == "softmax"), requires_grad=True)
        self.before = torch.randn(LAYERS, images, QUERIES, 4, requires_grad=True)

    @property
    def output(self) -> DETROutput:
        return DETROutput(self.logits, self.before.sigmoid())

    def losses(self, wanted: Targets, pairs: Pairs | None = None, real: Tensor | None = None) -> Losses:
        pairs = HungarianMatcher(self.scores)(self.output, wanted) if pairs is None else pairs
        return SetCriterion(self.scores)(self.output, wanted, pairs, real=real)

    def judged(self, wanted: Targets, pairs: Pairs | None = None, real: Tensor | None = None) -> Tensor:
        """Which queries' classes take a gradient, bool [L, B, Q]."""
        losses = self.losses(wanted, pairs, real)
        assert all(loss.shape == (LAYERS,) and loss.isfinite().all() for loss in losses.values())
        (gradient,) = torch.autograd.grad(SetCriterion(self.scores).total(losses), self.logits)
        assert gradient.isfinite().all()
        return (gradient != 0).any(-1)


def wanted_classes(pairs: Pairs, wanted: Targets, absent: int) -> Tensor:
    classes = torch.full((LAYERS, IMAGES, QUERIES), absent)
    for layer, image, query, target in torch.stack(pairs, 1).tolist():
        classes[layer, image, query] = wanted.labels[image, target]
    return classes


def test_softmax_is_the_cross_entropy_with_a_weight_of_no_object() -> None:
    found, wanted = Found("softmax"), targets([[0, 2, -1], [1, 1, 0]])
    pairs = HungarianMatcher()(found.output, wanted)
    classes = wanted_classes(pairs, wanted, CLASSES)
    for layer, loss in enumerate(found.losses(wanted, pairs)["loss_ce"]):
        weight = torch.tensor([1.0] * CLASSES + [0.1])
        expected = F.cross_entropy(found.logits[layer].flatten(0, 1), classes[layer].flatten(), weight=weight)
        torch.testing.assert_close(loss, expected)


def test_sigmoid_is_the_focal_loss() -> None:
    found, wanted = Found("sigmoid"), targets([[0, 2, -1], [1, 1, 0]])
    pairs = HungarianMatcher("sigmoid")(found.output, wanted)
    present = F.one_hot(wanted_classes(pairs, wanted, CLASSES), CLASSES + 1)[..., :-1].float()
    for layer, loss in enumerate(found.losses(wanted, pairs)["loss_ce"]):
        expected = sigmoid_focal_loss(found.logits[layer], present[layer], alpha=0.25, gamma=2, reduction="sum") / 5
        torch.testing.assert_close(loss, expected)


def test_boxes_cost_their_distance_and_overlap() -> None:
    found, wanted = Found("sigmoid"), targets([[0, 2, -1], [1, 1, 0]])
    pairs = HungarianMatcher("sigmoid")(found.output, wanted)
    losses = found.losses(wanted, pairs)
    for layer in range(LAYERS):
        chosen = pairs.layer == layer
        ours = found.output.boxes[layer, pairs.image[chosen], pairs.query[chosen]]
        theirs = wanted.boxes[pairs.image[chosen], pairs.target[chosen]]
        torch.testing.assert_close(losses["loss_bbox"][layer], F.l1_loss(ours, theirs, reduction="sum") / 5)
        overlap = generalized_box_iou(xyxy(ours), xyxy(theirs)).diagonal()
        torch.testing.assert_close(losses["loss_giou"][layer], (1 - overlap).sum() / 5)


def test_losses_are_weighted_and_divided_by_the_mean_count_of_the_processes() -> None:
    found, wanted = Found("sigmoid"), targets([[0, 2], [1, 1]])
    pairs = HungarianMatcher("sigmoid")(found.output, wanted)
    alone = found.losses(wanted, pairs)
    criterion, halved = SetCriterion("sigmoid", weight_class=3), {"over_processes": lambda value: value / 2}
    for name, loss in criterion(found.output, wanted, pairs, repeats=4, **halved).items():
        torch.testing.assert_close(loss, alone[name] / 2)
    expected = 3 * alone["loss_ce"].sum() + 5 * alone["loss_bbox"].sum() + 2 * alone["loss_giou"].sum()
    torch.testing.assert_close(criterion.total(alone), expected)


@scored
def test_a_batch_without_objects_teaches_that_there_are_none(scores: Scores) -> None:
    found, wanted = Found(scores), targets([[-1], [-1]])
    losses = found.losses(wanted)
    assert losses["loss_bbox"].tolist() == losses["loss_giou"].tolist() == [0.0, 0.0]
    SetCriterion(scores).total(losses).backward()
    assert found.logits.grad is not None
    assert found.before.grad is not None, "the same graph as with objects"
    assert found.logits.grad.isfinite().all()
    assert found.logits.grad.abs().sum() > 0
    assert (found.before.grad == 0).all()


@scored
def test_more_objects_than_queries(scores: Scores) -> None:
    assert Found(scores, images=1).judged(targets([[0, 1, 2] * 5])).all()


@scored
def test_boxes_without_area_have_finite_gradients(scores: Scores) -> None:
    found, wanted = Found(scores), targets([[0, 1], [2, 0]])
    wanted.boxes[..., 2:] = 0
    found.before = torch.full_like(found.before, -200.0).requires_grad_()  # a sigmoid of exactly 0
    wanted.boxes[0, 0] = 0  # at the same place
    SetCriterion(scores).total(found.losses(wanted)).backward()
    assert found.before.grad is not None
    assert found.before.grad.isfinite().all()


@scored
def test_a_query_on_a_crowd_costs_nothing_unless_it_is_matched(scores: Scores) -> None:
    found, wanted = Found(scores), targets([[0, 1], [1, 2]], crowd=[(0, 1)])
    wanted.boxes[0, 1] = torch.tensor([0.25, 0.25, 0.4, 0.4])
    with torch.no_grad():
        places = torch.tensor([[0.2, 0.2, 0.1, 0.1], [0.8, 0.8, 0.1, 0.1], [0.45, 0.25, 0.1, 0.1]])
        found.before[:, :, :3] = places.logit()
        found.before[:, :, 3] = torch.tensor([0.47, 0.25, 0.1, 0.1]).logit()  # less than half of it is inside
        found.before[:, :, 4:] = torch.tensor([0.8, 0.2, 0.1, 0.1]).logit()
    layer, image = torch.arange(LAYERS).repeat_interleave(3), torch.tensor([0, 1, 1] * LAYERS)
    query, target = torch.tensor([5, 0, 1] * LAYERS), torch.tensor([0, 0, 1] * LAYERS)
    judged = found.judged(wanted, Pairs(layer, image, query, target))
    assert judged[:, 0].tolist() == [[False, True, False, True, True, True]] * LAYERS
    assert judged[:, 1].all(), "another image's crowd"
    query[image == 0] = 0
    assert found.judged(wanted, Pairs(layer, image, query, target))[:, 0, 0].all(), "matched"


@scored
def test_an_image_with_a_crowd_alone(scores: Scores) -> None:
    found, wanted = Found(scores, images=1), targets([[0]], crowd=[(0, 0)])
    wanted.boxes[0, 0] = torch.tensor([0.5, 0.5, 1.0, 1.0])
    with torch.no_grad():
        found.before[..., 2:] = -4
    assert not found.judged(wanted).any()
    wanted.boxes[0, 0] = torch.tensor([0.5, 0.5, 1e-3, 1e-3])
    assert found.judged(wanted).all()


@scored
def test_queries_that_are_none_cost_nothing(scores: Scores) -> None:
    found, wanted = Found(scores), targets([[0, 1], [2, -1]])
    real = torch.tensor([[True] * QUERIES, [True] * 2 + [False] * (QUERIES - 2)])
    index = torch.tensor([0, 1, 0])
    image = torch.tensor([0, 0, 1])
    pairs = Pairs(*(torch.cat([part] * LAYERS) for part in (index, image, index, index)))
    pairs = pairs._replace(layer=torch.arange(LAYERS).repeat_interleave(3))
    assert torch.equal(found.judged(wanted, pairs, real), real.expand(LAYERS, -1, -1))
    assert not found.judged(
        targets([[-1], [-1]]), HungarianMatcher(scores)(found.output, targets([[-1], [-1]])), torch.zeros_like(real)
    ).any()


def test_half_precision_is_judged_in_single() -> None:
    found, wanted = Found("softmax"), targets([[0, 1], [2, -1]])
    narrow = DETROutput(*(part.bfloat16() for part in found.output))
    losses = SetCriterion()(narrow, wanted, HungarianMatcher()(narrow, wanted))
    assert {loss.dtype for loss in losses.values()} == {torch.float32}


def test_errors_in_number_and_class() -> None:
    logits = torch.full((1, 2, 3, 3), -9.0)
    logits[0, 0, :, 2] = 9  # nothing found
    logits[0, 1, :2, 0], logits[0, 1, 2, 2] = 9, 9  # two of class 0
    wanted = Targets(torch.tensor([[0, 1], [0, 1]]), boxes(2, 2), torch.tensor([[False, True], [False, False]]))
    assert cardinality_error(logits, wanted, "softmax").tolist() == [0.5]
    assert cardinality_error(logits[..., :2], wanted, "sigmoid").tolist() == [0.5]
    image, query = torch.tensor([1, 1]), torch.tensor([0, 1])
    assert class_error(logits, wanted, Pairs(torch.zeros(2).long(), image, query, query)).item() == 50
