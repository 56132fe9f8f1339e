"""The way from a batch through a model's outputs to AP."""

import pytest
import torch

from multimodal.models.detr import DETROutput
from tasks import registry
from tasks.base import Batch
from tasks.detr.task import DETRModule
from tests.tasks.two_processes import built


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_model_that_knows_the_boxes_has_an_ap_of_1(shift: float, expected: float) -> None:
    module, data = built(registry.get("detr"))
    assert isinstance(module, DETRModule)
    data.setup("fit")
    module.val_metrics["coco"].labels = data.labels
    for batch, _ in zip(data.val_dataloader(), range(3), strict=False):
        known = _perfect(batch, module.model.config.num_classes, shift)
        module.by_size = lambda images, valid, known=known: known  # type: ignore[method-assign]
        module.evaluate(batch, module.val_metrics)
    values = module.val_metrics.compute()
    assert values["val/AP"].item() == pytest.approx(expected)
    assert values["val/AR100"].item() == pytest.approx(expected)
    assert {name.split("/")[2] for name in values if name.startswith("val/AP/")} <= set(data.labels)


def _perfect(batch: Batch, classes: int, shift: float) -> DETROutput:
    """A query for each true box, with its class, and shifted by so many image sides."""
    logits = torch.full((*batch["labels"].shape, classes), -9.0)
    for image, query in (batch["labels"] >= 0).nonzero().tolist():
        logits[image, query, batch["labels"][image, query]] = 9.0
    return DETROutput(logits, batch["boxes"] + torch.tensor([shift, 0, 0, 0]))
