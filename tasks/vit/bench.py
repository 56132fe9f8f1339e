"""What the benchmark measures of the Vision Transformer."""

from typing import Any

import torch

from multimodal.models.vit import SIZES, ViTConfig
from tasks.workload import Data, Setting, Subject, Workload, compiled, default_recipe, model_for, training

TRAIN, THROUGHPUT = 8, 16


def workloads(size: str) -> list[Workload]:
    """A training step of a batch of 8, and inference of one image and of 16."""
    if size == "tiny":
        config, options = default_recipe("vit", num_classes=10)  # digits
        return _works("ViT, default recipe", config, options)
    sizes: dict[str, dict[str, Any]] = {name: dict(SIZES[name]) for name in ("Ti", "S")}
    published = [_works(f"ViT-{name}/16, 224", ViTConfig(**fields), {}) for name, fields in sizes.items()]
    return [work for works in published for work in works]


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
