"""What the benchmark measures of DETR."""

from dataclasses import replace
from typing import Any

import torch

from multimodal.data.scenes import SHAPES
from multimodal.models.detr import DETRConfig
from tasks.workload import Data, Setting, Subject, Workload, compiled, default_recipe, model_for, training

BATCH = 2
OBJECTS = 7
"""In an image; COCO has 7.3."""
FROZEN = {"resnet50": ("conv1", "bn1", "layer1")}
"""Parts of a backbone that are not trained, as in the original code."""


def workloads(size: str) -> list[Workload]:
    """A training step with the losses of all decoder layers, and inference."""
    if size == "tiny":
        config, options = default_recipe("detr", num_classes=len(SHAPES))
        return _works("DETR, default recipe", config, options, side=128)
    full = DETRConfig()
    encoder, decoder = replace(full.encoder, depth=3), replace(full.decoder, depth=3)
    light = replace(full, backbone="tf_efficientnet_lite0", encoder=encoder, decoder=decoder)
    return [
        *_works("DETR-R50, 512", full, {}, side=512),
        *_works("DETR EfficientNet-Lite0 3+3, 512", light, {}, side=512),
    ]


def _works(model: str, config: DETRConfig, options: dict[str, Any], *, side: int) -> list[Workload]:
    def data(batch: int) -> Data:
        centre, sides = torch.rand(batch, OBJECTS, 2) * 0.6 + 0.2, torch.rand(batch, OBJECTS, 2) * 0.3 + 0.05
        return {
            "image": torch.randn(batch, 3, side, side),
            "valid": torch.ones(batch, side, side, dtype=torch.bool),
            "labels": torch.randint(config.num_classes, (batch, OBJECTS)),
            "boxes": torch.cat([centre, sides], -1),
            "crowd": torch.zeros(batch, OBJECTS, dtype=torch.bool),
        }

    def train(setting: Setting, data: Data) -> Subject:
        subject = training("detr", config, setting, data, **options)
        for part in FROZEN.get(config.backbone, ()):
            subject.model.backbone.net.get_submodule(part).requires_grad_(False)  # type: ignore[union-attr]
        return subject

    def infer(setting: Setting, data: Data) -> Subject:
        detr, images = model_for("detr", config, setting), data["image"].to(setting.dtype)
        run = compiled(detr, setting)
        return Subject(run=lambda: run(images), model=detr)

    def work(name: str, batch: int, **more: Any) -> Workload:
        given: dict[str, Any] = {
            "model": model,
            "name": name,
            "batch": batch,
            "data": lambda: data(batch),
            "config": config,
        }
        return Workload(**given, unit="images", facts={"frozen": FROZEN.get(config.backbone, ())}, **more)

    return [
        work("train", BATCH, ours=train, trains=True, clip=0.1),
        work("inference", 1, ours=infer),
        work("inference", BATCH, ours=infer),
    ]
