"""What the benchmark measures of the Vision Transformer."""

from typing import Any

import torch
from torch.optim import AdamW

from multimodal.models.vit import SIZES, ViT, ViTConfig
from tasks.workload import Data, Setting, Subject, Workload, compiled, default_recipe, model_for, training

TRAIN, THROUGHPUT = 8, 16


def workloads(size: str) -> list[Workload]:
    """A training step of a batch of 8, inference of one image and of 16; of one size what AdamW takes of a step."""
    if size == "tiny":
        config, options = default_recipe("vit", num_classes=10)  # digits
        return [*_works("ViT, default recipe", config, options), optimizer("ViT, default recipe", config)]
    sizes: dict[str, dict[str, Any]] = {name: dict(SIZES[name]) for name in ("Ti", "S")}
    published = [_works(f"ViT-{name}/16, 224", ViTConfig(**fields), {}) for name, fields in sizes.items()]
    return [*(work for works in published for work in works), optimizer("ViT-S/16", ViTConfig(**sizes["S"]))]


def optimizer(model: str, config: ViTConfig) -> Workload:
    """AdamW's step alone, as training has it: fused."""
    return Workload(
        model=model,
        name="AdamW step",
        batch=1,
        data=dict,
        ours=lambda setting, data: step(config, setting, fused=True),
        config=config,
        unit="steps",
        facts={"optimizer": True},
        only_float32=True,
        compiles=False,
    )


def step(config: ViTConfig, setting: Setting, **implementation: Any) -> Subject:
    """Of a model with gradients of noise."""
    weights = list(ViT(config).to(setting.device).parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return Subject(
        run=AdamW(weights, lr=1e-5, **implementation).step,
        model=None,  # which would say that it is run
        parameters=sum(weight.numel() for weight in weights),
    )


def _works(model: str, config: ViTConfig, options: dict[str, Any]) -> list[Workload]:
    def data(batch: int) -> Data:
        images = torch.randn(batch, config.in_channels, *config.image_hw)
        return {"image": images, "label": torch.randint(config.num_classes, (batch,))}

    def train(setting: Setting, data: Data) -> Subject:
        return training("vit", config, setting, data, **options)

    def infer(setting: Setting, data: Data) -> Subject:
        vit, images = model_for("vit", config, setting), data["image"].to(setting.dtype)
        run = compiled(vit, setting)
        return Subject(run=lambda: run(images), model=vit)

    def work(name: str, batch: int, **more: Any) -> Workload:
        return Workload(
            model=model, name=name, batch=batch, data=lambda: data(batch), config=config, unit="images", **more
        )

    return [
        work("train", TRAIN, ours=train, trains=True),
        work("inference", 1, ours=infer),
        work("inference", THROUGHPUT, ours=infer),
    ]
