"""How well images and texts find each other.

Q queries, C candidates, I images, T texts, E embed_dim of the joint space
"""

import torch
from torch import Tensor

RECALL_AT = (1, 5, 10)
_CHUNK = 2**24
"""Similarities that are held at a time."""


def ranks(similarity: Tensor, positives: Tensor) -> Tensor:
    """The rank, from 1, of each query's best right candidate among the wrong ones: int64 [Q].

    A wrong candidate that is as similar comes first, so that features which are all alike find nothing.

    Args:
        similarity: [Q, C].
        positives: bool [Q, C], the right candidates; at least one in each row.
    """
    best = similarity.masked_fill(~positives, -torch.inf).amax(dim=1, keepdim=True)
    ahead = ~(similarity < best) & ~positives  # a NaN is ahead as well
    return 1 + ahead.sum(dim=1)


def retrieval_ranks(
    image_features: Tensor, text_features: Tensor, image_ids: Tensor, text_image_ids: Tensor, caption_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The ranks of images' texts among all texts, int64 [I], and of texts' images among all images, int64 [T].

    An image may have any number of texts. A text is right for an image also where it equals one of the image's own.

    Args:
        image_features: [I, E], of length 1.
        text_features: [T, E], of length 1.
        image_ids: int64 [I], which image it is.
        text_image_ids: int64 [T], the image that a text is of.
        caption_ids: int64 [T], equal for equal texts.
    """
    images, image_of_text = _numbered(image_ids, text_image_ids)
    captions = caption_ids.unique(return_inverse=True)[1]
    pairs = torch.stack([image_of_text, captions])  # [2, T]: this image has this caption
    return (
        _ranks(image_features, images, text_features, captions, pairs),
        _ranks(text_features, captions, image_features, images, pairs.flip(0)),
    )


def _ranks(queries: Tensor, rows: Tensor, candidates: Tensor, columns: Tensor, pairs: Tensor) -> Tensor:
    """Ranks of all queries, some at a time; `rows` and `columns` number queries and candidates as `pairs` does."""
    size = max(1, _CHUNK // len(candidates))
    found = []
    for part, numbers in zip(queries.split(size), rows.split(size), strict=True):
        known, local = numbers.unique(return_inverse=True)
        row, column = pairs[:, torch.isin(pairs[0], known)]
        table = torch.zeros(len(known), int(columns.max()) + 1, dtype=torch.bool, device=rows.device)
        table[torch.searchsorted(known, row.contiguous()), column] = True
        found.append(ranks(part @ candidates.T, table[local][:, columns]))
    return torch.cat(found)


def _numbered(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of ids as numbers from 0."""
    numbers = torch.cat([first, second]).unique(return_inverse=True)[1]
    return numbers[: len(first)], numbers[len(first) :]


def summarize(ranks: Tensor, name: str) -> dict[str, float]:
    """R@1, R@5, R@10 (shares from 0 to 1) and the median rank of queries, as `NAME_R@1` … `NAME_median_rank`."""
    ordered = ranks.double()
    recalls = {f"{name}_R@{k}": float((ordered <= k).double().mean()) for k in RECALL_AT}
    return {**recalls, f"{name}_median_rank": float(ordered.quantile(0.5))}
