"""What the benchmark measures of DETR."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multimodal.data.scenes import SHAPES
from multimodal.models.detr import DETRConfig, DETROutput
from tasks.detr.criterion import SetCriterion
from tasks.detr.matcher import HungarianMatcher, Targets
from tasks.workload import Data, Setting, Subject, Workload, both_ways, compiled, default_recipe, model_for, training

BATCH = 2
OBJECTS = 7
"""In an image; COCO has 7.3."""
FROZEN = {"resnet50": ("conv1", "bn1", "layer1")}
"""Parts of a backbone that are not trained, as in the original code."""


def workloads(size: str) -> list[Workload]:
    """A training step with the losses of all decoder layers, inference, and these losses alone."""
    if size == "tiny":
        config, options = default_recipe("detr", num_classes=len(SHAPES))
        return [*_works("DETR, default recipe", config, options, side=128), losses("DETR, default recipe", config)]
    full = DETRConfig()
    encoder, decoder = replace(full.encoder, depth=3), replace(full.decoder, depth=3)
    light = replace(full, backbone="tf_efficientnet_lite0", encoder=encoder, decoder=decoder)
    return [
        *_works("DETR-R50, 512", full, {}, side=512),
        losses("DETR-R50", full),
        *_works("DETR EfficientNet-Lite0 3+3, 512", light, {}, side=512),
    ]


def losses(model: str, config: DETRConfig) -> Workload:
    """The matching and the losses of all decoder layers, and the gradients of what the heads say."""
    layers = config.decoder.depth
    classes = config.num_classes + (config.scores == "softmax")

    def data() -> Data:
        queries = layers, BATCH, config.num_queries
        return {"logits": torch.randn(*queries, classes), "found": _boxes(*queries), **_objects(config, BATCH)}

    def ours(setting: Setting, data: Data) -> Subject:
        matcher, criterion = HungarianMatcher(config.scores), SetCriterion(config.scores)
        output = DETROutput(*(data[name].clone().requires_grad_() for name in ("logits", "found")))
        targets = Targets(data["labels"], data["boxes"], data["crowd"])
        return both_ways(lambda: criterion.total(criterion(output, targets, matcher(output, targets))), output)

    return Workload(
        model=model,
        name=f"losses alone, {layers} layers, forward + backward",
        batch=BATCH,
        data=data,
        ours=ours,
        config=config,
        unit="images",
        facts={"losses": True},
        only_float32=True,
        compiles=False,
    )


def _boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], -1)


def _objects(config: DETRConfig, batch: int) -> Data:
    return {
        "labels": torch.randint(config.num_classes, (batch, OBJECTS)),
        "boxes": _boxes(batch, OBJECTS),
        "crowd": torch.zeros(batch, OBJECTS, dtype=torch.bool),
    }


def _works(model: str, config: DETRConfig, options: dict[str, Any], *, side: int) -> list[Workload]:
    def data(batch: int) -> Data:
        return {
            "image": torch.randn(batch, 3, side, side),
            "valid": torch.ones(batch, side, side, dtype=torch.bool),
            **_objects(config, batch),
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
