"""A DETR as other libraries' files, through the record by which the command line finds them."""

from pathlib import Path

import pytest
import torch

from multimodal.pretrained import Checkpoint
from tasks import registry
from tests.parity.detr import padded_batch, tiny


@pytest.mark.parametrize(("name", "out"), [("huggingface", "folder"), ("facebook", "detr-r50.pth")])
def test_what_is_written_opens_again(name: str, out: str, tmp_path: Path) -> None:
    form = next(form for form in registry.get("detr").formats if form.name == name)
    assert form.suffix == (Path(out).suffix or None)
    model = tiny(backbone="resnet18").eval()
    form.load(form.write)(Checkpoint.of("detr", model), tmp_path / out)
    images, valid = padded_batch()
    logits, boxes = form.load(form.open)(tmp_path / out)(images, valid)
    with torch.no_grad():
        expected = model(images, valid)
    assert torch.equal(logits, expected.logits)
    assert torch.equal(boxes, expected.boxes)
