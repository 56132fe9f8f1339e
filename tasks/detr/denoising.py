"""Denoising queries: true boxes with noise, which the decoder is to restore ("DN-DETR", Li et al. 2022, section 4).

B batch, M objects, K noised boxes, Q the model's own queries, L decoder layers
"""

import torch
from torch import Tensor

from multimodal.blocks.queries import Noised
from tasks.detr.matcher import Pairs, Targets


def add_noise(
    targets: Targets, most: int, num_classes: int, num_queries: int, *, label_noise: float, box_noise: float
) -> tuple[Noised, Tensor]:
    """Noised boxes in as many groups as `most` allows; each group holds every object of an image
    once, or the first `most` of them.

    The number of boxes depends on the padded shape of the targets alone, so that a batch without objects has the same
    graph as any other.

    Args:
        targets: the objects.
        most: about how many noised boxes an image gets.
        num_classes: of the model.
        num_queries: of the model.
        label_noise: probability that a class is replaced by a random one.
        box_noise: how far a centre moves, as a share of half the side, and how much a side changes, as a share.

    Returns:
        The noised boxes, and the object int64 [B, K] that each comes from.
    """
    slots = min(targets.labels.shape[1], most)
    groups = max(1, most // slots)
    order = (~targets.present).int().argsort(dim=1, stable=True)[:, :slots]  # objects first
    source = order.repeat(1, groups)  # [B, K]
    real = targets.present.gather(1, source)
    labels = targets.labels.gather(1, source).clamp(min=0)
    boxes = targets.boxes.gather(1, source[..., None].expand(-1, -1, 4))

    wrong = torch.rand_like(boxes[..., 0]) < label_noise
    labels = torch.where(wrong, torch.randint_like(labels, num_classes), labels)
    change = (torch.rand_like(boxes) * 2 - 1) * box_noise
    centres, sides = boxes.split(2, dim=-1)
    shift, growth = change.split(2, dim=-1)
    boxes = torch.cat([centres + shift * sides / 2, sides * (1 + growth)], dim=-1).clamp(1e-3, 1 - 1e-3)
    return Noised(labels, boxes, real, _visible(slots, groups, num_queries, labels.device)), source


def _visible(slots: int, groups: int, num_queries: int, device: torch.device) -> Tensor:
    """Which queries may see which, bool [1, 1, K + Q, K + Q].

    A noised box sees its group and the model's own queries; these do not see what would tell them the answer.
    """
    group = torch.arange(slots * groups, device=device) // slots
    mask = torch.ones(2 * (len(group) + num_queries,), dtype=torch.bool, device=device)
    mask[: len(group), : len(group)] = group[:, None] == group
    mask[len(group) :, : len(group)] = False
    return mask[None, None]


def denoising_pairs(noised: Noised, source: Tensor, layers: int) -> Pairs:
    """Which noised box answers for which object, in all layers."""
    image, query = noised.real.nonzero().unbind(1)
    layer = torch.arange(layers, device=image.device).repeat_interleave(len(image))
    image, query = image.repeat(layers), query.repeat(layers)
    return Pairs(layer, image, query, source[image, query])
