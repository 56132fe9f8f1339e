"""COCO's average precision, beside pycocotools itself."""

import contextlib
import io
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from tasks.detr.metrics import CocoAP

NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
Image = tuple[dict[str, Tensor], dict[str, Tensor]]


def _boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    corner = rng.random((count, 2)) * 150
    return np.concatenate([corner, corner + rng.random((count, 2)) * rng.choice([20, 60, 150])], 1)


def _image(rng: np.random.Generator, classes: int, image_id: int) -> Image:
    """True boxes, some of them crowds, and detections of which half are near one."""
    true, found = int(rng.integers(0, 7)), int(rng.choice([0, 3, 20, 130]))
    boxes, labels = _boxes(rng, true), rng.integers(0, classes, true)
    detected, named = _boxes(rng, found), rng.integers(0, classes, found)
    if true:
        near = rng.integers(0, true, found // 2)
        detected[: found // 2] = boxes[near] + rng.normal(0, 3, (found // 2, 4))
        named[: found // 2] = labels[near]
    scores = np.round(rng.random(found) * 20) / 20  # some are equal
    area = (boxes[:, 2:] - boxes[:, :2]).prod(1) * rng.uniform(0.3, 1, true)
    return (
        {"scores": _float(scores), "labels": torch.from_numpy(named), "boxes": _float(detected)},
        {
            "image_id": torch.tensor(image_id),
            "labels": torch.from_numpy(labels),
            "boxes": _float(boxes),
            "crowd": torch.from_numpy(rng.random(true) < 0.2),
            "area": _float(area),
        },
    )


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).float()


def _images(seed: int) -> list[Image]:
    rng = np.random.default_rng(seed)
    classes, ids = int(rng.integers(1, 6)), rng.permutation(1000)
    return [_image(rng, classes, int(ids[index])) for index in range(rng.integers(1, 8))]


def _measured(images: list[Image], labels: list[str] | None = None) -> dict[str, float]:
    metric = CocoAP(labels)
    for found, true in images:
        metric.update([found], [true])
    return {name: value.item() for name, value in metric.compute().items()}


def _xywh(boxes: Tensor) -> list[list[float]]:
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).double().tolist()


def _expected(images: list[Image]) -> dict[str, float]:
    """What pycocotools says, without what is -1."""
    data: dict[str, Any] = {"images": [], "annotations": [], "categories": [{"id": i} for i in range(6)], "info": {}}
    results = []
    for found, true in images:
        image_id = int(true["image_id"])
        data["images"].append({"id": image_id})
        rows = (true["labels"].tolist(), _xywh(true["boxes"].double()), true["crowd"].tolist(), true["area"].tolist())
        for label, box, crowd, area in zip(*rows, strict=True):
            annotation = {"category_id": label, "bbox": box, "iscrowd": int(crowd), "area": area, "image_id": image_id}
            data["annotations"].append({"id": len(data["annotations"]) + 1, **annotation})
        rows = (found["labels"].tolist(), _xywh(found["boxes"].double()), found["scores"].tolist())
        results += [
            {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
            for label, box, score in zip(*rows, strict=True)
        ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = data
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results) if results else COCO(), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    values = {**dict(zip(NAMES, evaluation.stats, strict=False)), "AR100": evaluation.stats[8]}
    for label in range(6):
        precision = evaluation.eval["precision"][:, :, label, 0, 2]
        values[f"AP/{label}"] = precision[precision > -1].mean() if (precision > -1).any() else -1
    return {name: float(value) for name, value in values.items() if value != -1}


@pytest.mark.parametrize("seed", range(40))
def test_the_values_are_those_of_pycocotools(seed: int) -> None:
    images = _images(seed)
    assert _measured(images) == pytest.approx(_expected(images), abs=1e-12)


def test_the_order_of_the_images_does_not_matter() -> None:
    images = _images(3)
    assert _measured(images) == _measured(images[::-1])


def _one(image_id: int, *, boxes: list[list[float]], crowd: bool = False, found: bool = True) -> Image:
    corners = torch.tensor(boxes).reshape(-1, 4)
    labels, count = torch.zeros(len(corners), dtype=torch.int64), len(corners) if found else 0
    area = (corners[:, 2:] - corners[:, :2]).prod(1)
    return (
        {"scores": torch.full((count,), 0.9), "labels": labels[:count], "boxes": corners[:count]},
        {
            "image_id": torch.tensor(image_id),
            "labels": labels,
            "boxes": corners,
            "crowd": labels.bool() | crowd,
            "area": area,
        },
    )


def test_what_has_no_true_box_is_left_out() -> None:
    perfect = _measured([_one(1, boxes=[[0, 0, 10, 10]])], ["cat", "dog"])
    assert perfect.keys() == {"AP", "AP50", "AP75", "AP_small", "AR100", "AP/cat"}
    assert list(perfect.values()) == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(
    "images",
    [
        [],
        [_one(1, boxes=[])],
        [_one(1, boxes=[[0, 0, 10, 10]], crowd=True), _one(2, boxes=[])],
    ],
    ids=["no image", "no box", "only crowds"],
)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_without_anything_to_find_there_is_no_metric(images: list[Image]) -> None:
    assert _measured(images) == {}


def test_nothing_found_is_zero() -> None:
    assert set(_measured([_one(1, boxes=[[0, 0, 10, 10]], found=False)]).values()) == {0.0}


def test_the_size_is_that_of_the_annotation() -> None:
    image = _one(1, boxes=[[0, 0, 100, 100]])
    image[1]["area"] = torch.tensor([1000.0])  # of an object that fills a tenth of its box
    assert "AP_small" in _measured([image])
    assert "AP_large" not in _measured([image])


@pytest.mark.parametrize("field", ["scores", "boxes"])
def test_a_detection_that_is_not_finite_finds_nothing(field: str) -> None:
    image = _one(1, boxes=[[0, 0, 10, 10]])
    image[0][field] = image[0][field] * float("nan")
    assert _measured([image])["AP"] == 0


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    _measured(_images(0))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("own", [0, 1, 3])
def test_processes_with_unequally_many_images_put_them_together(own: int) -> None:
    images = [image for seed in range(3) for image in _images(seed)]
    one, other = CocoAP(), CocoAP()
    for index, (found, true) in enumerate(images):
        (one if index < own else other).update([found], [true])
    other.sync()  # which has every process tell its shapes, and here gathers nothing
    theirs = iter([torch.cat(getattr(other, name)) for name in other.metric_state])

    def gather(value: Tensor, group: Any) -> list[Tensor]:
        other = next(theirs)
        assert (value.dtype, value.shape[1:]) == (other.dtype, other.shape[1:])
        return [value, other]

    one.dist_sync_fn, one.distributed_available_fn = gather, lambda: True
    one._update_count = 1
    assert {name: value.item() for name, value in one.compute().items()} == _measured(images)
