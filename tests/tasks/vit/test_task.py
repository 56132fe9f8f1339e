"""The Lightning module of image classification."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader

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


# Mixing


def test_mixed_targets_are_shares_of_two_images() -> None:
    module, batch = ViTModule(mixup=0.8, **TINY), _batch(6)
    images, targets = module.mix(batch["image"], batch["label"])
    share = float(targets[0, 0])
    assert targets.shape == (6, 6)
    assert torch.allclose(targets, share * torch.eye(6) + (1 - share) * torch.eye(6).roll(1, 0))
    assert torch.allclose(images, share * batch["image"] + (1 - share) * batch["image"].roll(1, 0), atol=1e-6)
    assert torch.equal(batch["label"], torch.arange(6))
    module, batch = ViTModule(cutmix=1.0, **TINY), _batch(6, size=8)
    images, targets = module.mix(batch["image"], batch["label"])
    kept = (images == batch["image"]).float().mean(dim=(1, 2, 3))
    assert torch.allclose(kept, targets.diagonal(), atol=1e-6)


def test_mixup_and_cutmix_take_turns_with_the_probability_of_either() -> None:
    module, batch = ViTModule(mixup=1.0, cutmix=1.0, mix_probability=0.5, **TINY), _batch(2)
    kinds = Counter()
    for _ in range(400):
        images, targets = module.mix(batch["image"], batch["label"])
        untouched = (images == batch["image"]).flatten(1).all(1)
        if targets.dim() == 1:
            assert untouched.all()
            kinds["none"] += 1
        else:
            kinds["cutmix" if (images == batch["image"]).any() else "mixup"] += 1
    assert 160 < kinds["none"] < 240
    assert 70 < kinds["cutmix"] < 130
    assert 70 < kinds["mixup"] < 130


def test_mixing_draws_from_the_global_generator_and_in_training_alone() -> None:
    module, batch = ViTModule(mixup=0.8, cutmix=1.0, **TINY), _batch()
    torch.manual_seed(5)
    first = [module.loss(batch).item() for _ in range(3)]
    torch.manual_seed(5)
    assert [module.loss(batch).item() for _ in range(3)] == first
    assert len(set(first)) == 3
    before = torch.get_rng_state()
    module.eval()
    module.evaluate(batch, module.val_metrics)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("count", [33, 8, 1])
@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("criterion", ["cross_entropy", "binary_cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_batch_is_mixed(count: int, distilled: bool, criterion: Any, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}
    module = ViTModule(distilled=distilled, criterion=criterion, **options, **TINY)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = module.loss(_batch(count))
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters() if parameter.grad is not None)
    with torch.no_grad():
        whole = ViTModule(distilled=distilled, criterion=criterion, **options, **TINY).bfloat16()
        batch = _batch(count)
        assert whole.loss({**batch, "image": batch["image"].bfloat16()}).isfinite()


def test_odd_batches_train(tmp_path: Path) -> None:
    """33 images in batches of 8, and one by one."""
    rows = _batch(33)
    dataset = [{"image": rows["image"][index], "label": int(rows["label"][index])} for index in range(33)]
    for size, batches in ((8, 5), (1, 33)):
        module = ViTModule(mixup=0.8, cutmix=1.0, **TINY)
        before = module.model.head.weight.clone()
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader(dataset, batch_size=size))
        assert trainer.global_step == batches
        assert not torch.equal(module.model.head.weight, before)


def test_smoothing_of_mixed_targets_is_timms() -> None:
    module, batch = ViTModule(label_smoothing=0.1, **TINY), _batch(6)
    logits = module.model(batch["image"])
    for share in (0.3, 1.0):
        module.mix = lambda images, labels, share=share: (
            images,
            share * one_hot(labels, 6) + (1 - share) * one_hot(labels.roll(1), 6),
        )
        rolled = batch["label"].roll(1)
        smooth = [one_hot(labels, 6) * 0.9 + 0.1 / 6 for labels in (batch["label"], rolled)]
        target = share * smooth[0] + (1 - share) * smooth[1]
        expected = SoftTargetCrossEntropy()(logits, target)
        assert module.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms_with_each_mixed_class_a_whole_target(smoothing: float) -> None:
    module = ViTModule(criterion="binary_cross_entropy", label_smoothing=smoothing, **TINY)
    batch = _batch(6)
    logits = module.model(batch["image"])
    expected = BinaryCrossEntropy(smoothing=smoothing)(logits, batch["label"])
    assert module.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    mixed = 0.7 * torch.eye(6) + 0.3 * torch.eye(6).roll(1, 0)
    module.mix = lambda images, labels: (images, mixed)
    if not smoothing:
        expected = BinaryCrossEntropy(target_threshold=0.0)(logits, mixed)
        assert module.loss(batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": -1.0}, r"mixup is -1\.0, expected at least 0"),
        ({"cutmix": float("nan")}, "cutmix is nan, expected at least 0"),
        ({"mix_probability": 1.5}, r"mix_probability is 1\.5, expected a share in \[0, 1\]"),
    ],
)
def test_impossible_mixing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTModule(**options, **TINY)
