"""Which query answers for which object: the bipartite matching of DETR (section 3.1, appendix A.2).

L decoder layers, B batch, Q queries, M objects, C outputs of the class head
"""

from typing import Literal, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_convert

from multimodal.models.detr import DETROutput

Scores = Literal["softmax", "sigmoid"]


class Targets(NamedTuple):
    """The objects of a batch of images, padded to the most that one has."""

    labels: Tensor
    """int64 [B, M]: class; -1 = no object."""
    boxes: Tensor
    """[B, M, 4]: centre x, centre y, width, height as shares of the image's own width and height."""
    crowd: Tensor
    """bool [B, M]: a region of many objects: neither an object to find nor background."""

    @property
    def present(self) -> Tensor:
        """bool [B, M]: the objects to find."""
        return (self.labels >= 0) & ~self.crowd


class Pairs(NamedTuple):
    """Matched queries and objects, one a row: int64 [P] each."""

    layer: Tensor
    image: Tensor
    query: Tensor
    target: Tensor


def pairwise_giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised IoU (Rezatofighi et al. 2019) of boxes [..., Q, 4] with [..., M, 4], both xyxy: [..., Q, M]."""
    a, b = a[..., :, None, :], b[..., None, :, :]
    return giou(a, b)


def giou(a: Tensor, b: Tensor) -> Tensor:
    """Generalised IoU of boxes [..., 4] with as many others, both xyxy: [...]; 0 / 0 is -1 … 0, never NaN."""
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner
    least = torch.finfo(hull.dtype).tiny
    return inner / union.clamp(min=least) - (hull - union) / hull.clamp(min=least)


def xyxy(boxes: Tensor) -> Tensor:
    """Corners of boxes that are given by their centre."""
    return box_convert(boxes, "cxcywh", "xyxy")


class HungarianMatcher:
    """The matching of least cost, for all layers and images at once.

    Args:
        scores: how the class head scores.
        cost_class, cost_box, cost_giou: weights of the class score, of the L1 distance and of the generalised IoU.
        alpha, gamma: of the focal loss, by which sigmoid scores cost ("Deformable DETR", Zhu et al. 2021).
    """

    def __init__(
        self,
        scores: Scores = "softmax",
        *,
        cost_class: float = 1.0,
        cost_box: float = 5.0,
        cost_giou: float = 2.0,
        alpha: float = 0.25,
        gamma: float = 2.0,
    ) -> None:
        self.scores = scores
        self.cost_class = cost_class
        self.cost_box = cost_box
        self.cost_giou = cost_giou
        self.alpha = alpha
        self.gamma = gamma

    @torch.no_grad()
    def __call__(self, output: DETROutput, targets: Targets) -> Pairs:
        """Match the outputs [L, B, Q, …] of all layers; each object gets a query of its own while there are any."""
        cost = self.cost(output, targets).cpu().numpy()
        present = targets.present.cpu().numpy()
        rows = []
        for layer in range(cost.shape[0]):
            for image in range(cost.shape[1]):
                columns = present[image].nonzero()[0]
                queries, chosen = linear_sum_assignment(cost[layer, image][:, columns])
                rows += [(layer, image, query, columns[at]) for query, at in zip(queries, chosen, strict=True)]
        found = torch.tensor(rows, dtype=torch.int64, device=output.logits.device).view(-1, 4)
        return Pairs(*found.unbind(1))

    def cost(self, output: DETROutput, targets: Targets) -> Tensor:
        """The cost [L, B, Q, M] of each pair; finite, also where the model's outputs are not."""
        logits, boxes = output.logits.float(), output.boxes.float()
        columns = targets.labels.clamp(min=0)[None, :, None].expand(*logits.shape[:3], -1)
        by_class = self._class_cost(logits).gather(-1, columns)  # [L, B, Q, M]
        by_distance = torch.cdist(boxes, targets.boxes[None].expand(len(boxes), -1, -1, -1), p=1)
        by_overlap = -pairwise_giou(xyxy(boxes), xyxy(targets.boxes)[None])
        cost = self.cost_class * by_class + self.cost_box * by_distance + self.cost_giou * by_overlap
        return cost.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6)

    def _class_cost(self, logits: Tensor) -> Tensor:
        if self.scores == "softmax":
            return -logits.softmax(-1)
        score = logits.sigmoid()
        present = self.alpha * (1 - score) ** self.gamma * -(score + 1e-8).log()
        absent = (1 - self.alpha) * score**self.gamma * -(1 - score + 1e-8).log()
        return present - absent


@torch.no_grad()
def nearest_tokens(places: Tensor, targets: Targets) -> Pairs:
    """The token nearest to the centre of each object, where the encoder's tokens propose boxes.

    A fixed choice teaches the tokens sooner than a matching. With more than one token an object, the same box would be
    proposed several times. A token that is nearest to several objects takes the smallest.

        Args:
            places: [B, N, 2], see `token_places`.
            targets: the objects.
    """
    distance = torch.cdist(places, targets.boxes[..., :2].to(places.dtype))  # [B, N, M]
    nearest = (distance == distance.amin(1, keepdim=True)) & targets.present[:, None]
    area = targets.boxes[..., 2:].prod(-1)[:, None].expand_as(distance).masked_fill(~nearest, float("inf"))
    image, query = nearest.any(-1).nonzero().unbind(1)
    return Pairs(torch.zeros_like(image), image, query, area.argmin(-1)[image, query])
