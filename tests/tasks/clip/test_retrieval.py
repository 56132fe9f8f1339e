"""Ranks and recalls."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.clip import retrieval
from tasks.clip.retrieval import ranks, retrieval_ranks, summarize


def features(count: int, dim: int = 16) -> Tensor:
    return F.normalize(torch.randn(count, dim), dim=-1)


def test_perfect_features_are_found_first() -> None:
    images = F.normalize(torch.eye(12) + 0.01, dim=-1)
    owner = torch.tensor([0] * 5 + list(range(12)) + [11])  # 6, 1, … 1, 2 captions
    found, back = retrieval_ranks(images, images[owner], torch.arange(12), owner, torch.arange(18))
    assert found.tolist() == [1] * 12
    assert back.tolist() == [1] * 18
    assert summarize(found, "image_to_text") == {
        "image_to_text_R@1": 1.0,
        "image_to_text_R@5": 1.0,
        "image_to_text_R@10": 1.0,
        "image_to_text_median_rank": 1.0,
    }


@pytest.mark.parametrize("chunk", [1, 50, 2**24])
def test_ranks_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(retrieval, "_CHUNK", chunk)
    image_ids = torch.tensor([7, 3, 100, 4, 9])
    owner = torch.tensor([3, 3, 9, 7, 100, 4, 4, 4, 7, 9, 100])
    captions = torch.tensor([0, 1, 2, 0, 5, 6, 1, 8, 9, 5, 11])  # some of different images are equal
    images, texts = features(5), features(11)
    found, back = retrieval_ranks(images, texts, image_ids, owner, captions)
    own = [{int(captions[t]) for t in range(11) if owner[t] == image} for image in image_ids]
    right = torch.tensor([[int(captions[t]) in own[i] for t in range(11)] for i in range(5)])
    similarity = images @ texts.T
    for i in range(5):
        order = similarity[i].argsort(descending=True).tolist()
        first = next(position for position, t in enumerate(order) if right[i, t])
        assert found[i] == first + 1
    for t in range(11):
        order = similarity[:, t].argsort(descending=True).tolist()
        assert back[t] == 1 + next(position for position, i in enumerate(order) if right[i, t])


def test_features_that_are_all_alike_find_nothing() -> None:
    same = torch.ones(20, 4) / 2
    found, back = retrieval_ranks(same, same, torch.arange(20), torch.arange(20), torch.arange(20))
    assert found.tolist() == back.tolist() == [20] * 20
    assert ranks(torch.full((2, 3), torch.nan), torch.eye(3).bool()[:2]).tolist() == [3, 3]


def test_equal_captions_are_all_right() -> None:
    same = torch.ones(20, 4) / 2
    found, back = retrieval_ranks(same, same, torch.arange(20), torch.arange(20), torch.zeros(20, dtype=torch.int64))
    assert found.tolist() == back.tolist() == [1] * 20


def test_recalls_and_median() -> None:
    found = summarize(torch.tensor([1, 1, 5, 6, 10, 400]), "x")
    assert found == pytest.approx({"x_R@1": 2 / 6, "x_R@5": 3 / 6, "x_R@10": 5 / 6, "x_median_rank": 5.5})
