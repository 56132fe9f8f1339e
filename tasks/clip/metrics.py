"""How well images and texts find each other, over all processes.

Legend: I images, T texts, Q queries, C candidates, P pairs, E width of the joint space.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

TOP = (1, 5, 10)
"""The k of each R@k. It is written without the @, which some trackers refuse."""
ROWS = 1024
"""Queries whose scores are in memory at a time."""
NO_IMAGE = -1
"""What stands for the image of a text that is none's caption."""


class Retrieval(Metric):
    """Each image looks for its captions among all texts, and each caption for its images among all images.

    An image may have any number of captions and a caption any number of images: a query's rank is that of the best of
    what is right for it, among what is wrong. Equal scores do not count as found: what is wrong goes first. Texts that
    are no image's caption are wrong answers for all images.

    Args:
        embed_dim: width of the features.
    """

    higher_is_better = True
    full_state_update = False

    image_features: list[Tensor]
    image_ids: list[Tensor]
    text_features: list[Tensor]
    text_ids: list[Tensor]
    pairs: list[Tensor]
    scale: Tensor

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        for name in self._empty():
            self.add_state(name, default=[], dist_reduce_fx="cat")
        self.add_state("scale", default=torch.zeros(()), dist_reduce_fx="max")

    def update(
        self,
        image_features: Tensor,
        image_ids: Tensor,
        text_features: Tensor,
        text_ids: Tensor,
        caption_of: Tensor,
        scale: Tensor,
    ) -> None:
        """Add images, and texts, which may belong to them.

        Args:
            image_features: [I, E], of length 1.
            image_ids: int64 [I]; each comes once.
            text_features: [T, E], of length 1.
            text_ids: int64 [T]; equal texts have equal ids, and are one candidate.
            caption_of: int64 [T], the id of the image of each text; -1 = of none.
            scale: scalar by which similarities become logits; the same each time.
        """
        belongs = caption_of != NO_IMAGE
        self.image_features.append(image_features.float())
        self.image_ids.append(image_ids)
        self.text_features.append(text_features.float())
        self.text_ids.append(text_ids)
        self.pairs.append(torch.stack([caption_of, text_ids], dim=1)[belongs])
        self.scale = scale.detach().float().to(self.device)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather what all processes have, also where this one has nothing: its lists then tell their shapes."""
        for name, empty in self._empty().items():
            getattr(self, name).append(empty)
        super().sync(*args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """Scalars by name, none where there is nothing to measure.

        - loss: cross-entropy of the right texts among all, shared evenly, in the mean over images
        - top1: share of the images whose best text is a right one
        - image_to_text/Rk, text_to_image/Rk: R@k, the share of the queries with something right among the best k
        - image_to_text/median_rank, text_to_image/median_rank: from 1
        """
        images, image_ids = self._each("image_features", "image_ids")
        texts, text_ids = self._each("text_features", "text_ids")
        pairs = self._whole("pairs").unique(dim=0)
        columns = zip((image_ids, text_ids), pairs.T.contiguous(), strict=True)
        right = torch.stack([torch.searchsorted(ids, column) for ids, column in columns], dim=1)
        if not len(right):
            return {}
        by_image, losses = [], []
        for scores, is_right in _rows(images, texts, right):
            by_image.append(ranks(scores, is_right))
            losses.append(cross_entropy(scores, is_right, self.scale))
        found = torch.cat(by_image)
        values = {"loss": torch.cat(losses).mean(), "top1": (found == 1).double().mean()}
        values |= _summary("image_to_text", found)
        by_text = [ranks(scores, is_right) for scores, is_right in _rows(texts, images, right.flip(1))]
        return values | _summary("text_to_image", torch.cat(by_text))

    def _each(self, features: str, ids: str) -> tuple[Tensor, Tensor]:
        """Those of every id once, in the order of the ids, however they were dealt to the processes."""
        found = self._whole(ids)
        unique, which = found.unique(return_inverse=True)
        first = torch.full_like(unique, len(found)).scatter_reduce(
            0, which, torch.arange(len(found), device=found.device), "amin"
        )
        return self._whole(features)[first], unique

    def _whole(self, name: str) -> Tensor:
        state = getattr(self, name)
        return dim_zero_cat([self._empty()[name], *([state] if isinstance(state, Tensor) else state)])

    def _empty(self) -> dict[str, Tensor]:
        """What each state holds without images."""
        shapes = {"image_ids": (0,), "text_ids": (0,), "pairs": (0, 2)}
        ids = {name: torch.zeros(shape, dtype=torch.int64, device=self.device) for name, shape in shapes.items()}
        features = ("image_features", "text_features")
        return ids | {name: torch.zeros(0, self.embed_dim, device=self.device) for name in features}


def _summary(name: str, found: Tensor) -> dict[str, Tensor]:
    """Of ranks int64 [Q], as float64 scalars."""
    recalls = {f"{name}/R{k}": (found <= k).double().mean() for k in TOP}
    return recalls | {f"{name}/median_rank": found.double().quantile(0.5)}


def ranks(scores: Tensor, is_right: Tensor) -> Tensor:
    """For each query the rank, from 1, of its best right candidate among the wrong ones: int64 [Q].

    Args:
        scores: [Q, C]; one that is not a number goes before all others.
        is_right: bool [Q, C], at least one a row.
    """
    best = scores.masked_fill(~is_right, float("-inf")).amax(dim=1, keepdim=True)
    return 1 + (~(scores < best) & ~is_right).sum(dim=1)


def cross_entropy(scores: Tensor, is_right: Tensor, scale: Tensor) -> Tensor:
    """For each query the cross-entropy of its right candidates, which share the target evenly: float64 [Q]."""
    likelihood = (scale.double() * scores.double()).log_softmax(dim=1)
    return -likelihood.masked_fill(~is_right, 0).sum(dim=1) / is_right.sum(dim=1)


def _rows(queries: Tensor, candidates: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores [q, C] and which of them are right, for the queries that have something right, some at a time.

    Args:
        queries: [Q, E].
        candidates: [C, E].
        right: int64 [P, 2], which candidate is right for which query: pairs of their positions.
    """
    asked, which = right[:, 0].unique(return_inverse=True)
    order = which.argsort()
    which, answer = which[order], right[order, 1]
    for start in range(0, len(asked), ROWS):
        rows = asked[start : start + ROWS]
        mine = (which >= start) & (which < start + ROWS)
        is_right = torch.zeros(len(rows), len(candidates), dtype=torch.bool, device=queries.device)
        is_right[which[mine] - start, answer[mine]] = True
        yield queries[rows] @ candidates.T, is_right
