"""Exports of what only the suite's own DETR has: queries that are boxes, and images of any size."""

from pathlib import Path

import torch

from multimodal.models.detr import DETR
from multimodal.pretrained import Checkpoint, build_config
from tasks import export, formats, registry
from tasks.detr.example import LEAST

STACK = {"embed_dim": 16, "depth": 1, "num_heads": 2}


def test_a_graph_of_the_recipe_takes_images_of_any_size(tmp_path: Path) -> None:
    recipe = {"backbone": "conv", "scores": "sigmoid", "queries": "proposed", "modulated": True, "denoising": 10}
    values = {**recipe, "num_classes": 3, "num_queries": 80, "encoder": STACK, "decoder": STACK}
    model = DETR(build_config("detr", values)).eval()
    (form,) = [form for form in registry.get("detr").formats if form.name == "onnx"]
    assert export.export(Checkpoint.of("detr", model), form, tmp_path / "m.onnx") <= 1e-5
    opened = form.load(form.open)(tmp_path / "m.onnx")
    for size in ((1, 3, LEAST, LEAST), (3, 3, LEAST + 1, 200), (1, 3, 150, LEAST)):
        images = torch.randn(size)
        for found, expected in zip(opened(images), formats.as_function(model)(images), strict=True):
            assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
