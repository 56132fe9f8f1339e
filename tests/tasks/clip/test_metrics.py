"""Retrieval: exact for perfect features, honest where scores are equal, whatever the batches and the processes."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tasks.clip import metrics
from tasks.clip.metrics import Retrieval, ranks

Item = tuple[int, list[int]]
"""An image and its captions, by id."""
DATA: list[Item] = [(5, [50, 51]), (6, [60]), (7, [50, 70, 71]), (9, [])]
"""Two images share a caption; the last has none."""


def features(ids: list[int], seed: int = 0) -> Tensor:
    """One direction an id."""
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(1000 * seed + number)) for number in ids]
    return normalize(torch.stack(rows), dim=-1) if rows else torch.zeros(0, 8)


def measured(data: list[Item], size: int = 2, image_seed: int = 0, alone: tuple[int, ...] = ()) -> dict[str, float]:
    metric = Retrieval(8)
    for start in range(0, len(data), size):
        part = data[start : start + size]
        texts = [(caption, image) for image, captions in part for caption in captions]
        texts += [(caption, -1) for caption in alone] if start == 0 else []
        images = [image for image, _ in part]
        metric.update(
            features(images, image_seed),
            torch.tensor(images),
            features([caption for caption, _ in texts]),
            torch.tensor([caption for caption, _ in texts], dtype=torch.int64),
            torch.tensor([image for _, image in texts], dtype=torch.int64),
            torch.tensor(3.0),
        )
    return {name: value.item() for name, value in metric.compute().items()}


def by_hand(data: list[Item], image_seed: int, alone: tuple[int, ...] = ()) -> dict[str, float]:
    """The definition, in loops."""
    captions = sorted({caption for _, several in data for caption in several} | set(alone))
    scores = {
        (image, caption): float(features([image], image_seed)[0] @ features([caption])[0])
        for (image, _), caption in itertools.product(data, captions)
    }

    def found(query: Any, candidates: list[int], right: set[int], score: Any) -> int:
        best = max(score(query, candidate) for candidate in right)
        return 1 + sum(score(query, other) >= best for other in candidates if other not in right)

    own = {image: set(several) for image, several in data}
    images = [image for image, several in data if several]
    by_image = [found(i, captions, own[i], lambda a, b: scores[a, b]) for i in images]
    of = {c: {i for i in own if c in own[i]} for c in captions if any(c in several for several in own.values())}
    by_text = [found(c, list(own), of[c], lambda a, b: scores[b, a]) for c in of]
    losses = []
    for image in images:
        logits = {caption: 3.0 * scores[image, caption] for caption in captions}
        total = np.logaddexp.reduce(list(logits.values()))
        losses.append(-np.mean([logits[caption] - total for caption in own[image]]))
    values = {"loss": float(np.mean(losses)), "top1": float(np.mean(np.array(by_image) == 1))}
    for name, ranked in (("image_to_text", by_image), ("text_to_image", by_text)):
        values |= {f"{name}/R{k}": float(np.mean(np.array(ranked) <= k)) for k in (1, 5, 10)}
        values[f"{name}/median_rank"] = float(np.median(ranked))
    return values


@pytest.mark.parametrize("image_seed", range(5))
@pytest.mark.parametrize("alone", [(), (1, 2, 3, 60)])
def test_the_numbers_are_those_of_the_definition(
    image_seed: int, alone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_hand(DATA, image_seed, alone)
    assert measured(DATA, image_seed=image_seed, alone=alone) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(metrics, "ROWS", 2)
    assert measured(DATA, image_seed=image_seed, alone=alone) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_and_order_do_not_matter(size: int) -> None:
    for order in itertools.permutations(DATA):
        assert measured(list(order), size, image_seed=3) == pytest.approx(measured(DATA, 4, image_seed=3), rel=1e-6)


def test_perfect_features_find_everything() -> None:
    """Each image lies where its only caption does, among 300; equal captions are one."""
    metric, ids = Retrieval(8), torch.arange(300)
    rows = normalize(torch.randn(300, 8), dim=-1)
    texts = torch.cat([ids, ids])
    metric.update(rows, ids, rows[texts], texts, texts, torch.tensor(100.0))
    values = metric.compute()
    assert values.pop("loss") < 0.7
    assert {value.item() for value in values.values()} == {1.0}
    assert len(values) == 9


def test_features_that_are_all_alike_find_nothing() -> None:
    metric, ids = Retrieval(4), torch.arange(20)
    rows = normalize(torch.ones(20, 4), dim=-1)
    metric.update(rows, ids, rows, ids, ids, torch.tensor(1.0))
    values = metric.compute()
    assert values["top1"] == values["image_to_text/R10"] == values["text_to_image/R10"] == 0
    assert values["image_to_text/median_rank"] == 20
    assert values["loss"].item() == pytest.approx(np.log(20))


def test_a_score_that_is_not_a_number_is_no_success() -> None:
    scores = torch.tensor([[0.9, float("nan"), 0.1], [float("nan"), 0.2, 0.1], [float("nan")] * 3])
    right = torch.tensor([[True, False, False]] * 3)
    assert ranks(scores, right).tolist() == [2, 3, 3]


def test_without_captions_there_is_nothing_to_measure() -> None:
    assert Retrieval(8).compute() == {}
    assert measured([(1, []), (2, [])], alone=(4,)) == {}


def test_a_metric_starts_anew() -> None:
    metric, ids = Retrieval(8), torch.arange(3)
    for _ in range(2):
        metric.update(features([0, 1, 2]), ids, features([0, 1, 2]), ids, ids, torch.tensor(1.0))
        assert metric.compute()["top1"] == 1
        metric.reset()
    assert metric.compute() == {}
