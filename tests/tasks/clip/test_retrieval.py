"""Ranks and recalls of images and texts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.clip import metrics
from tasks.clip.metrics import Retrieval, ranks


def features(count: int, dim: int = 16) -> Tensor:
    return F.normalize(torch.randn(count, dim), dim=-1)


def measured(images: Tensor, image_ids: Tensor, texts: Tensor, text_ids: Tensor, owner: Tensor) -> dict[str, float]:
    metric = Retrieval(images.shape[1])
    metric.update(images, image_ids, texts, text_ids, owner, torch.tensor(10.0))
    return {name: float(value) for name, value in metric.compute().items()}


def test_perfect_features_are_found_first() -> None:
    images = F.normalize(torch.eye(12) + 0.01, dim=-1)
    owner = torch.tensor([0] * 5 + list(range(12)) + [11])  # 6, 1, … 1, 2 captions
    found = measured(images, torch.arange(12), images[owner], torch.arange(18), owner)
    assert {value for name, value in found.items() if name != "loss"} == {1.0}


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_ranks_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(metrics, "ROWS", rows)
    image_ids = torch.tensor([7, 3, 100, 4, 9])
    owner = torch.tensor([3, 3, 9, 7, 100, 4, 4, 4, 7, 9, 100])
    captions = torch.tensor([0, 1, 2, 0, 5, 6, 1, 8, 9, 5, 11])  # some of different images are equal
    images, distinct = features(5), features(12)
    found = measured(images, image_ids, distinct[captions], captions, owner)
    known = captions.unique().tolist()
    pairs = set(zip(owner.tolist(), captions.tolist(), strict=True))
    right = torch.tensor([[(int(image), text) in pairs for text in known] for image in image_ids])
    similarity = images @ distinct[known].T

    def by_hand(scores: Tensor, is_right: Tensor) -> Tensor:
        orders = scores.argsort(dim=1, descending=True).tolist()
        firsts = [
            next(at for at, index in enumerate(order) if row[index])
            for order, row in zip(orders, is_right, strict=True)
        ]
        return torch.tensor(firsts) + 1

    for name, places in (
        ("image_to_text", by_hand(similarity, right)),
        ("text_to_image", by_hand(similarity.T, right.T)),
    ):
        for k in (1, 5, 10):
            assert found[f"{name}/R@{k}"] == pytest.approx(float((places <= k).double().mean()))
        assert found[f"{name}/median_rank"] == float(places.double().quantile(0.5))


def test_features_that_are_all_alike_find_nothing() -> None:
    same, numbers = torch.ones(20, 4) / 2, torch.arange(20)
    found = measured(same, numbers, same, numbers, numbers)
    assert (found["top1"], found["image_to_text/R@10"], found["text_to_image/median_rank"]) == (0, 0, 20)
    assert ranks(torch.full((2, 3), torch.nan), torch.eye(3).bool()[:2]).tolist() == [3, 3]
