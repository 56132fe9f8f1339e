"""The Lightning module of image classification."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from multimodal import pretrained
from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint
from tasks.vit.task import ViTModule

TINY: dict[str, Any] = {"image_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 6}


def _batch(count: int = 4, size: int = 8) -> dict[str, torch.Tensor]:
    return {"image": torch.randn(count, 3, size, size), "label": torch.arange(count) % 6}


def _checkpoint(labels: list[str] | None = None, **config: Any) -> Checkpoint:
    return Checkpoint.of("vit", ViT(ViTConfig(**(TINY | config))), labels=labels)


def test_options_reach_the_config_and_the_hyper_parameters() -> None:
    module = ViTModule(lr=0.5, label_smoothing=0.2, **TINY)
    assert module.model.config == ViTConfig(**TINY)
    assert {"lr": 0.5, "label_smoothing": 0.2, "embed_dim": 8}.items() <= dict(module.hparams).items()
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.5, expected a share in \[0, 1\)"):
        ViTModule(label_smoothing=1.5, **TINY)


def test_labels_are_smoothed_in_training_alone() -> None:
    module, batch = ViTModule(label_smoothing=0.2, **TINY), _batch()
    logits = module.model(batch["image"])
    assert module.loss(batch).item() == pytest.approx(cross_entropy(logits, batch["label"], label_smoothing=0.2).item())
    module.evaluate(batch, module.val_metrics)
    assert module.val_metrics.compute()["val/loss"].item() == pytest.approx(
        cross_entropy(logits, batch["label"]).item()
    )


def test_both_heads_of_a_distilled_model_learn() -> None:
    module = ViTModule(distilled=True, **TINY)
    module.loss(_batch()).backward()
    assert module.model.head.weight.grad.abs().sum() > 0
    assert module.model.distilled_head.weight.grad.abs().sum() > 0


def test_metrics_count_each_image_once() -> None:
    module = ViTModule(**TINY)
    module.model.forward = lambda images: images  # type: ignore[method-assign]
    logits = 9 * torch.eye(6) - torch.arange(6)
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([1])):  # 3 hits, then a miss that is in the top 5
        module.evaluate({"image": logits[: len(labels)], "label": labels}, module.test_metrics)
    measured = module.test_metrics.compute()
    assert measured["test/accuracy"] == 0.75
    assert measured["test/top5"] == 1.0
    expected = cross_entropy(logits[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 1]))
    assert measured["test/loss"].item() == pytest.approx(expected.item())
    assert "val/top5" not in ViTModule(**(TINY | {"num_classes": 5})).val_metrics.compute()


def test_the_same_classes_keep_the_head() -> None:
    labels = list("abcdef")
    for given in (labels, None):
        module, checkpoint = ViTModule(**TINY), _checkpoint(labels)
        module.load_pretrained(checkpoint, "here", given)
        assert all(torch.equal(value, checkpoint.state_dict[name]) for name, value in module.model.state_dict().items())


@pytest.mark.parametrize("config", [{}, {"num_classes": 3}, {"distilled": True, "num_classes": 1000}])
def test_other_classes_get_a_new_head(config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    module = ViTModule(**(TINY | {"distilled": config.get("distilled", False)}))
    head = module.model.head.weight.clone()
    checkpoint = _checkpoint([str(index) for index in range(config.get("num_classes", 6))], **config)
    module.load_pretrained(checkpoint, "here", list("abcdef"))
    assert torch.equal(module.model.head.weight, head)
    assert torch.equal(module.model.prefix, checkpoint.state_dict["prefix"])
    assert (
        f"The head for the checkpoint's {config.get('num_classes', 6)} classes is replaced by a new one for 6."
        in caplog.text
    )


@pytest.mark.parametrize("size", [4, 16, (8, 12)])
def test_positions_fit_another_image_size(size: int | tuple[int, int]) -> None:
    module = ViTModule(**(TINY | {"image_size": size}))
    module.load_pretrained(_checkpoint(), "here")
    assert len(module.model.position) == 1 + math.prod(module.model.config.grid)


def test_what_does_not_fit_is_listed() -> None:
    module = ViTModule(**(TINY | {"depth": 2}))
    with pytest.raises(ValueError, match=r"^here: .*encoder\.blocks\.1\."):
        module.load_pretrained(_checkpoint(), "here")


def test_a_checkpoint_is_read_without_lightning(trained: Path) -> None:
    loaded = pretrained.load(trained, task="vit")
    assert loaded.labels == [str(digit) for digit in range(10)]
    assert loaded.preprocess["size"] == [8, 8]
    assert loaded.model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
