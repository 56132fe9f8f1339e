"""What a DETR is trained by: the set prediction loss (section 3.1), for every decoder layer (appendix A.4).

L decoder layers, B batch, Q queries, M objects, P pairs, C outputs of the class head
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal.models.detr import DETROutput
from tasks.detr.matcher import Pairs, Scores, Targets, giou, xyxy

OverProcesses = Callable[[Tensor], Tensor]
Losses = dict[str, Tensor]
"""By name, each of shape [L]:

- `loss_ce`: cross-entropy with "no object" weighted down, or the focal loss;
- `loss_bbox`: L1 distance of matched boxes, a mean over objects;
- `loss_giou`: 1 - generalised IoU of matched boxes, a mean over objects.
"""


class SetCriterion:
    """The losses of outputs that are matched already.

    Args:
        scores: how the class head scores.
        no_object: weight of "no object" in the cross-entropy; of softmax scores alone.
        weight_class, weight_box, weight_giou: of the three losses in `total`.
        alpha, gamma: of the focal loss ("Focal Loss for Dense Object Detection", Lin et al. 2017); of sigmoid scores.
    """

    def __init__(
        self,
        scores: Scores = "softmax",
        *,
        no_object: float = 0.1,
        weight_class: float = 1.0,
        weight_box: float = 5.0,
        weight_giou: float = 2.0,
        alpha: float = 0.25,
        gamma: float = 2.0,
    ) -> None:
        self.scores = scores
        self.no_object = no_object
        self.weights = {"loss_ce": weight_class, "loss_bbox": weight_box, "loss_giou": weight_giou}
        self.alpha = alpha
        self.gamma = gamma

    def total(self, losses: Losses) -> Tensor:
        """The weighted sum over all losses and layers, a scalar."""
        return torch.stack([self.weights[name] * loss.sum() for name, loss in losses.items()]).sum()

    def __call__(
        self,
        output: DETROutput,
        targets: Targets,
        pairs: Pairs,
        *,
        real: Tensor | None = None,
        repeats: int = 1,
        over_processes: OverProcesses = lambda value: value,
    ) -> Losses:
        """The losses of each layer.

        Args:
            output: of all layers, [L, B, Q, …].
            targets: the objects.
            pairs: which query answers for which object.
            real: bool [B, Q], False = a query that is none, as in denoising; None = all are.
            repeats: how many queries of a layer answer for each object, as in denoising.
            over_processes: the mean of a value over the processes that average their gradients, by whose counts the
                losses are divided: `tasks.base.mean_over_processes` in training, nothing where one process measures
                alone.
        """
        logits, boxes = output.logits.float(), output.boxes.float()
        layers = len(logits)
        count = over_processes(targets.present.sum().float()).clamp(min=1) * repeats
        found = boxes[pairs.layer, pairs.image, pairs.query]
        wanted = targets.boxes[pairs.image, pairs.target]
        distance = (found - wanted).abs().sum(-1)
        overlap = 1 - giou(xyxy(found), xyxy(wanted))
        classes, weight = self._classes(logits, targets, pairs, self._counts(boxes, targets, pairs, real))
        divisor = count if weight is None else over_processes(weight).clamp(min=torch.finfo(weight.dtype).tiny)
        return {
            "loss_ce": classes / divisor,
            "loss_bbox": _by_layer(distance, pairs, layers) / count,
            "loss_giou": _by_layer(overlap, pairs, layers) / count,
        }

    def _classes(self, logits: Tensor, targets: Targets, pairs: Pairs, counts: Tensor) -> tuple[Tensor, Tensor | None]:
        """The loss [L] of the classes, a sum over the queries that count, bool [L, B, Q].

        And the sum [L] of weights by which it is divided; None = by the number of objects.
        """
        classes = torch.full(logits.shape[:3], -1, device=logits.device)
        classes[pairs.layer, pairs.image, pairs.query] = targets.labels[pairs.image, pairs.target]
        if self.scores == "sigmoid":
            return (self._focal(logits, classes).sum(-1) * counts).sum((1, 2)), None
        absent = logits.shape[-1] - 1
        weight = logits.new_ones(classes.shape).masked_fill(classes < 0, self.no_object) * counts
        classes = classes.where(classes >= 0, absent)
        loss = F.cross_entropy(logits.flatten(0, 2), classes.flatten(), reduction="none").view_as(weight) * weight
        return loss.sum((1, 2)), weight.sum((1, 2))

    def _counts(self, boxes: Tensor, targets: Targets, pairs: Pairs, real: Tensor | None) -> Tensor:
        """The queries whose class is judged, bool [L, B, Q]: not those that found a crowd, nor those that are none."""
        counts = ~_in_crowd(boxes, targets)
        counts[pairs.layer, pairs.image, pairs.query] = True
        return counts if real is None else counts & real

    def _focal(self, logits: Tensor, classes: Tensor) -> Tensor:
        """[L, B, Q, C]."""
        present = F.one_hot(classes + 1, logits.shape[-1] + 1)[..., 1:].to(logits.dtype)
        loss = F.binary_cross_entropy_with_logits(logits, present, reduction="none")
        missed = (logits.sigmoid() - present).abs()
        return torch.where(present > 0, self.alpha, 1 - self.alpha) * missed**self.gamma * loss


def _by_layer(values: Tensor, pairs: Pairs, layers: int) -> Tensor:
    """Sums [L] of values [P]."""
    return values.new_zeros(layers).index_add(0, pairs.layer, values)


def _in_crowd(boxes: Tensor, targets: Targets) -> Tensor:
    """Whether at least half of a found box lies in one crowd region: bool [L, B, Q]. Such a box is not wrong."""
    if not targets.crowd.any():
        return torch.zeros(boxes.shape[:3], dtype=torch.bool, device=boxes.device)
    a, b = xyxy(boxes.detach())[..., :, None, :], xyxy(targets.boxes)[None, :, None]
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area = (a[..., 2:] - a[..., :2]).prod(-1)
    return ((inner > 0) & (inner >= 0.5 * area) & targets.crowd[None, :, None]).any(-1)


@torch.no_grad()
def cardinality_error(logits: Tensor, targets: Targets, scores: Scores) -> Tensor:
    """How far the number of objects found [..., B] is from the true one, on average: [...]; logits [..., B, Q, C]."""
    found = logits.argmax(-1) != logits.shape[-1] - 1 if scores == "softmax" else logits.amax(-1) > 0
    return (found.sum(-1) - targets.present.sum(-1)).abs().float().mean(-1)


@torch.no_grad()
def class_error(logits: Tensor, targets: Targets, pairs: Pairs, layer: int = -1) -> Tensor:
    """Share of one layer's matched queries whose best class is wrong, in percent; NaN without objects."""
    chosen = pairs.layer == layer % len(logits)
    best = logits[pairs.layer, pairs.image, pairs.query].argmax(-1)
    wrong = best != targets.labels[pairs.image, pairs.target]
    return 100 * wrong[chosen].float().mean()
