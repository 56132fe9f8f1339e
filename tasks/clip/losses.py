"""The losses of image-text pairs, in one process and in several.

B pairs of all processes, b pairs of one, E embed_dim of the joint space
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from multimodal.models.clip import CLIPOutput

LossKind = Literal["infonce", "sigmoid"]
RowLoss = Callable[[Tensor, Tensor], Tensor]
"""Logits [b, B] and which of them are of a right pair, bool [b, B], to the mean over the rows."""


class Pairs(NamedTuple):
    """Features of images and texts that belong together, and by what others belong together as well."""

    image_features: Tensor
    """[b, E], of length 1."""
    text_features: Tensor
    """[b, E], of length 1."""
    image_id: Tensor
    """int64 [b]: captions of one image have equal ones."""
    caption_id: Tensor
    """int64 [b]: equal captions have equal ones."""


def positives(rows: Pairs, columns: Pairs) -> Tensor:
    """Which text of `columns` fits which image of `rows`, and which image which text: bool [b, B].

    Those of one image, and those with the same caption. This is the same read from either side.
    """
    same_image = rows.image_id[:, None] == columns.image_id
    return same_image | (rows.caption_id[:, None] == columns.caption_id)


def contrastive_loss(
    image_features: Tensor, text_features: Tensor, logit_scale: Tensor, positives: Tensor | None = None
) -> Tensor:
    """InfoNCE (Radford et al. 2021, figure 3): the cross-entropy of each row and each column of the logits, averaged.

    Args:
        image_features, text_features: [B, E], of length 1.
        logit_scale: factor on the cosines.
        positives: bool [B, B], which text (column) fits which image (row); the right ones of a row share its target
            equally. None = each image has its own text alone.
    """
    right = _diagonal(image_features) if positives is None else positives
    logits = _logits(image_features, text_features, logit_scale, None)
    return (infonce_rows(logits, right) + infonce_rows(logits.T, right.T)) / 2


def sigmoid_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor,
    logit_bias: Tensor | None = None,
    positives: Tensor | None = None,
) -> Tensor:
    """SigLIP ("Sigmoid Loss for Language Image Pre-Training", Zhai et al. 2023, section 3.2): each pair by itself.

    Args:
        image_features, text_features: [B, E], of length 1.
        logit_scale: factor on the cosines.
        logit_bias: what is then added; None = nothing.
        positives: bool [B, B], which text (column) fits which image (row); None = each image has its own text alone.
    """
    right = _diagonal(image_features) if positives is None else positives
    return sigmoid_rows(_logits(image_features, text_features, logit_scale, logit_bias), right)


def pair_loss(
    output: CLIPOutput,
    image_id: Tensor,
    caption_id: Tensor,
    *,
    kind: LossKind = "infonce",
    local: bool = False,
    world_size: int = 1,
) -> Tensor:
    """The loss of a model's output, over the pairs of all processes.

    Each process has equally many pairs. The gradients are right once they are averaged over the processes, as DDP
    does: they then are those of one process with all pairs.

    Args:
        output: of this process's pairs.
        image_id, caption_id: int64 [b], see `Pairs`.
        kind: `contrastive_loss` or `sigmoid_loss`.
        local: this process computes the logits [b, B] of its own images and texts to all others, in place of all of
            them [B, B]; the loss is then its share, whose mean over the processes is the loss.
        world_size: processes that take part.
    """
    own = Pairs(output.image_features, output.text_features, image_id, caption_id)
    every = own if world_size == 1 else _gather(own)
    rows = own if local else every
    right = positives(rows, every)
    scale, bias = output.logit_scale, output.logit_bias
    logits = _logits(rows.image_features, every.text_features, scale, bias)
    if kind == "sigmoid":
        return sigmoid_rows(logits, right)
    transposed = _logits(rows.text_features, every.image_features, scale, bias) if local else logits.T
    return (infonce_rows(logits, right) + infonce_rows(transposed, right)) / 2


def infonce_rows(logits: Tensor, right: Tensor) -> Tensor:
    """Cross-entropy of rows [b, B] to targets that their right ones share, bool [b, B]; the mean over rows."""
    target = right.to(logits.dtype)
    return F.cross_entropy(logits, target / target.sum(dim=1, keepdim=True))


def sigmoid_rows(logits: Tensor, right: Tensor) -> Tensor:
    """Binary cross-entropy of each logit [b, B], bool [b, B]; summed over a row, the mean over rows."""
    return F.binary_cross_entropy_with_logits(logits, right.to(logits.dtype), reduction="sum") / len(logits)


def _logits(rows: Tensor, columns: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """In float32 whatever the towers compute in: at a scale of 100 bfloat16 is off by a third."""
    with torch.autocast(rows.device.type, enabled=False):
        logits = scale.float() * rows.float() @ columns.float().T
        return logits if bias is None else logits + bias.float()


def _diagonal(features: Tensor) -> Tensor:
    return torch.eye(len(features), dtype=torch.bool, device=features.device)


def _gather(own: Pairs) -> Pairs:
    """The pairs of all processes in the order of these, with gradients for those of this one."""
    features = [torch.cat(all_gather(part.float())) for part in own[:2]]
    ids = own.image_id.new_empty(dist.get_world_size(), 2, len(own.image_id))
    dist.all_gather(list(ids), torch.stack([own.image_id, own.caption_id]))
    return Pairs(*features, *ids.transpose(0, 1).flatten(1))
