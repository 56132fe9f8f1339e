"""Average precision as COCO measures it (Lin et al. 2014), over all processes.

Legend: N images, P predictions, T true boxes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

_AREAS = {"AP": 0, "AP_small": 1, "AP_medium": 2, "AP_large": 3}
_THRESHOLDS = {"AP50": 0, "AP75": 5}


class CocoAP(Metric):
    """AP, AP50, AP75, AP_small, AP_medium, AP_large, AR100, and AP/CLASS for each class.

    The numbers are pycocotools', several times as fast. Torchmetrics' wrapper is not used: its processes wait for each
    other without end where they got unequally many images.

    What has no true box to be measured by is left out, where pycocotools says -1, which looks like a low value.

    Args:
        labels: names of the classes; None = their numbers.
    """

    higher_is_better = True
    full_state_update = False

    images: list[Tensor]
    found_ids: list[Tensor]
    found_values: list[Tensor]
    true_ids: list[Tensor]
    true_values: list[Tensor]

    def __init__(self, labels: Sequence[str] | None = None) -> None:
        super().__init__()
        self.labels = labels
        for name in self._empty():
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, detections: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]]) -> None:
        """Add images.

        Args:
            detections: for each image `scores` [P], `labels` int64 [P] and `boxes` [P, 4], as x0, y0, x1, y1 in pixels.
                One with a value that is not finite is left out.
            targets: for each image `image_id` int64 [], `labels` int64 [T], `boxes` [T, 4] as above, `crowd` bool [T],
                and `area` [T] in square pixels, by which a box is small, medium or large.
        """
        for found, true in zip(detections, targets, strict=True):
            image = true["image_id"].reshape(1)
            values = torch.column_stack([found["scores"], found["boxes"]]).float()
            kept = values.isfinite().all(dim=1)
            self.images.append(image)
            self.found_ids.append(_ids(image, found["labels"])[kept])
            self.found_values.append(values[kept])
            self.true_ids.append(_ids(image, true["labels"], true["crowd"]))
            self.true_values.append(torch.column_stack([true["area"], true["boxes"]]).float())

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the images of all processes, also where this one has none: its lists then tell their shapes."""
        for name, empty in self._empty().items():
            getattr(self, name).append(empty)
        super().sync(*args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """The metrics as float64 scalars, without those that have nothing to be measured by."""
        state = {
            name: dim_zero_cat([empty, *_listed(getattr(self, name))]).cpu().numpy()
            for name, empty in self._empty().items()
        }
        evaluation = _evaluate(state)
        values = _summary(evaluation.eval)
        for position, label in enumerate(evaluation.params.catIds):
            name = str(label) if self.labels is None else self.labels[label]
            values[f"AP/{name}"] = _mean(evaluation.eval["precision"][:, :, position, 0])
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items() if value is not None}

    def _empty(self) -> dict[str, Tensor]:
        """What each state holds without images: image ids; image and class; score and box; image, class, crowd; …"""
        shapes = {"images": (0,), "found_ids": (0, 2), "true_ids": (0, 3)}
        ids = {name: torch.zeros(shape, dtype=torch.int64, device=self.device) for name, shape in shapes.items()}
        return ids | {name: torch.zeros(0, 5, device=self.device) for name in ("found_values", "true_values")}


def _ids(image: Tensor, *columns: Tensor) -> Tensor:
    """[n, 1 + columns] int64, of which the first column is the image's id."""
    return torch.column_stack([image.expand(len(columns[0])), *columns]).long()


def _listed(state: Tensor | list[Tensor]) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else state


def _evaluate(state: Mapping[str, NDArray[Any]]) -> COCOeval_faster:
    found, true = (
        _annotations(state["found_ids"], state["found_values"]),
        _annotations(state["true_ids"], state["true_values"]),
    )
    for annotation, score in zip(found, state["found_values"][:, 0].tolist(), strict=True):
        annotation |= {"score": score, "area": annotation["bbox"][2] * annotation["bbox"][3]}
    for annotation, crowd, area in zip(
        true, state["true_ids"][:, 2].tolist(), state["true_values"][:, 0].tolist(), strict=True
    ):
        annotation |= {"iscrowd": crowd, "area": area}
    # Sorted, so that equal scores count in the same order however the images were dealt to the processes.
    images = [{"id": image} for image in np.unique(state["images"]).tolist()]
    classes = [{"id": label} for label in np.unique(state["true_ids"][:, 1]).tolist()]
    evaluation = COCOeval_faster(_coco(images, classes, true), _coco(images, classes, found), iouType="bbox")
    evaluation.params.maxDets = [100]
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _annotations(ids: NDArray[Any], values: NDArray[Any]) -> list[dict[str, Any]]:
    """COCO's annotations, with boxes as x, y, width, height. Numbered from 1: pycocotools takes 0 for no match."""
    boxes = values[:, 1:].astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    return [
        {"id": number, "image_id": image, "category_id": label, "bbox": box}
        for number, ((image, label), box) in enumerate(zip(ids[:, :2].tolist(), boxes.tolist(), strict=True), start=1)
    ]


def _coco(images: list[dict[str, int]], classes: list[dict[str, int]], annotations: list[dict[str, Any]]) -> COCO:
    data = COCO()
    data.dataset = {"images": images, "categories": classes, "annotations": annotations}
    data.createIndex()
    return data


def _summary(measured: Mapping[str, Any]) -> dict[str, float | None]:
    """By name, None where there is nothing to measure."""
    precision = measured["precision"][..., 0]  # [thresholds, recalls, classes, areas]
    values = {name: _mean(precision[..., area]) for name, area in _AREAS.items()}
    values |= {name: _mean(precision[threshold, ..., 0]) for name, threshold in _THRESHOLDS.items()}
    return values | {"AR100": _mean(measured["recall"][:, :, 0, 0])}


def _mean(values: NDArray[Any]) -> float | None:
    present = values[values > -1]
    return float(present.mean()) if present.size else None
