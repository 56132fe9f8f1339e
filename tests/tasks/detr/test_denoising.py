"""True boxes with noise: how much of it, in how many groups, and who may see whom."""

import pytest
import torch

from tasks.detr.denoising import add_noise, denoising_pairs
from tasks.detr.matcher import Targets
from tests.tasks.detr.test_matcher import boxes, targets

CLASSES, QUERIES = 5, 3


def noise(wanted: Targets, most: int = 6, labels: float = 0.0, box: float = 0.0):  # type: ignore[no-untyped-def]
    return add_noise(wanted, most, CLASSES, QUERIES, label_noise=labels, box_noise=box)


def test_without_noise_each_group_holds_the_objects() -> None:
    wanted = targets([[-1, 4, 2], [0, 1, 3]], crowd=[(1, 1)])
    noised, source = noise(wanted)
    assert source.tolist() == [[1, 2, 0, 1, 2, 0], [0, 2, 1, 0, 2, 1]], "objects first"
    assert noised.real.tolist() == [[True, True, False] * 2] * 2
    for image in range(2):
        for slot in noised.real[image].nonzero()[:, 0].tolist():
            assert noised.labels[image, slot] == wanted.labels[image, source[image, slot]]
            torch.testing.assert_close(noised.boxes[image, slot], wanted.boxes[image, source[image, slot]])


@pytest.mark.parametrize(
    ("objects", "most", "slots"), [(1, 6, 6), (2, 6, 6), (3, 7, 6), (4, 7, 4), (6, 6, 6), (9, 6, 6), (9, 1, 1)]
)
def test_groups_are_as_many_as_there_is_room_for(objects: int, most: int, slots: int) -> None:
    noised, source = noise(targets([[1] * objects]), most)
    assert noised.labels.shape == noised.real.shape == source.shape == (1, slots)
    assert noised.mask.shape == (1, 1, slots + QUERIES, slots + QUERIES)
    group = min(objects, most)
    assert source.tolist() == [list(range(group)) * (slots // group)]


def test_a_noised_box_sees_its_group_and_the_own_queries_which_see_only_themselves() -> None:
    mask = noise(targets([[0, 1]]))[0].mask[0, 0]
    for query in range(6 + QUERIES):
        for key in range(6 + QUERIES):
            same_group = query < 6 and key < 6 and query // 2 == key // 2
            assert mask[query, key] == (key >= 6 or same_group)


@pytest.mark.parametrize("amount", [0.1, 0.4, 1.0])
def test_boxes_stay_within_the_noise(amount: float) -> None:
    wanted = Targets(torch.zeros(8, 50).long(), boxes(8, 50), torch.zeros(8, 50, dtype=torch.bool))
    noised, source = noise(wanted, 200, box=amount)
    true = wanted.boxes.gather(1, source[..., None].expand(-1, -1, 4))
    shift = (noised.boxes[..., :2] - true[..., :2]).abs() / (true[..., 2:] / 2)
    growth = noised.boxes[..., 2:] / true[..., 2:] - 1
    assert 0.95 * amount < shift.max() <= amount + 1e-4
    assert 0.95 * amount < growth.max() <= amount + 1e-4
    assert -amount - 1e-4 <= growth.min() < -0.95 * amount
    assert not torch.equal(noised.boxes[:, :50], noised.boxes[:, 50:100]), "each group has noise of its own"


def test_boxes_stay_strictly_within_the_image() -> None:
    wanted = targets([[0, 1, 2, 3]])
    wanted.boxes[0] = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 1, 1], [1, 0, 0.5, 0.0]])
    noised, _ = noise(wanted, 400, box=1.0)
    assert ((noised.boxes > 0) & (noised.boxes < 1)).all()


@pytest.mark.parametrize(("amount", "low", "high"), [(0.0, 0.0, 0.0), (0.5, 0.35, 0.45), (1.0, 0.75, 0.85)])
def test_so_many_classes_are_replaced(amount: float, low: float, high: float) -> None:
    """A random class is the right one once in five times."""
    noised, _ = noise(targets([[2] * 20] * 4), 1000, labels=amount)
    assert low <= (noised.labels != 2).float().mean() <= high
    assert set(noised.labels.unique().tolist()) <= set(range(CLASSES))


def test_a_batch_without_objects_has_the_shapes_of_any_other() -> None:
    noised, source = noise(targets([[-1, -1], [-1, -1]]), labels=0.5, box=0.4)
    other, _ = noise(targets([[1, 2], [0, -1]]), labels=0.5, box=0.4)
    assert [part.shape for part in noised] == [part.shape for part in other]
    assert not noised.real.any()
    assert ((noised.labels >= 0) & (noised.labels < CLASSES)).all()
    assert noised.boxes.isfinite().all()
    assert len(denoising_pairs(noised, source, 2).layer) == 0


def test_a_crowded_image_does_not_make_more_boxes() -> None:
    labels = torch.full((2, 10_000), -1)
    labels[0], labels[1, 9_999] = 1, 4
    wanted = Targets(labels, boxes(2, 10_000), torch.zeros(2, 10_000, dtype=torch.bool))
    noised, source = noise(wanted, 30)
    assert noised.labels.shape == (2, 30)
    assert noised.mask.shape[-1] == 30 + QUERIES
    assert noised.real.sum(1).tolist() == [30, 1]
    assert source[1, 0] == 9_999, "its only object is among them"


def test_each_noised_box_answers_for_its_object_in_every_layer() -> None:
    noised, source = noise(targets([[-1, 4], [0, 1]]), 4)
    pairs = denoising_pairs(noised, source, 3)
    found = torch.stack(pairs, 1).tolist()
    real = [(image, query) for image in range(2) for query in range(4) if noised.real[image, query]]
    assert found == [[layer, i, q, source[i, q].item()] for layer in range(3) for i, q in real]
