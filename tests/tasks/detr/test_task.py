"""The task's module: its losses, an evaluation that does not depend on batches, and the backbone's own options."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal.blocks import StackConfig
from tasks.base import Batch
from tasks.detr.task import DETRModule
from tests.tasks.detr.test_matcher import targets

STACK = StackConfig(embed_dim=16, depth=2, num_heads=2)
TINY: dict[str, Any] = {"num_classes": 3, "num_queries": 4, "backbone": "conv", "encoder": STACK, "decoder": STACK}
KINDS: list[dict[str, Any]] = [
    {"queries": "learned"},
    {"queries": "learned", "scores": "sigmoid"},
    {"queries": "boxes"},
    {"queries": "boxes", "scores": "sigmoid", "modulated": True, "denoising": 6},
    {"queries": "proposed", "modulated": True},
    {"queries": "proposed", "denoising": 6},
    {"queries": "proposed", "scores": "sigmoid", "modulated": True, "denoising": 6},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["-".join(map(str, kind.values())) for kind in KINDS])


def module(**options: Any) -> DETRModule:
    return DETRModule(**(TINY | options))


def batch(labels: list[list[int]], sizes: list[tuple[int, int]]) -> Batch:
    """Images of noise of those heights and widths, padded to the largest."""
    height, width = (max(side) for side in zip(*sizes, strict=True))
    valid = torch.zeros(len(sizes), height, width, dtype=torch.bool)
    for image, (h, w) in enumerate(sizes):
        valid[image, :h, :w] = True
    wanted = targets(labels)
    return {
        "image": torch.randn(len(sizes), 3, height, width) * valid[:, None],
        "valid": valid,
        "labels": wanted.labels,
        "boxes": wanted.boxes,
        "crowd": wanted.crowd,
        "area": wanted.boxes[..., 2:].prod(-1) * height * width,
        "size": torch.tensor(sizes),
        "image_id": torch.arange(len(sizes)),
    }


def only(whole: Batch, index: int) -> Batch:
    """One image of a batch, without padding."""
    alone = {name: value[index : index + 1] for name, value in whole.items()}
    height, width = alone["size"][0].tolist()
    return alone | {"image": alone["image"][..., :height, :width], "valid": alone["valid"][..., :height, :width]}


@kinds
@pytest.mark.parametrize("objects", [True, False], ids=["objects", "none"])
@pytest.mark.parametrize("sizes", [[(32, 32), (32, 32)], [(32, 24), (17, 40)], [(3, 2), (5, 4)]], ids=str)
def test_every_parameter_gets_a_gradient(kind: dict[str, Any], objects: bool, sizes: list[tuple[int, int]]) -> None:
    """Several processes wait for each other at each: none may be left out by a batch without objects."""
    ours = module(**kind).train()
    loss = ours.loss(batch([[0, 2, 1], [1, -1, -1]] if objects else [[-1], [-1]], sizes))
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for name, parameter in ours.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@kinds
def test_more_objects_than_queries_and_noised_boxes(kind: dict[str, Any]) -> None:
    ours = module(**kind).train()
    loss = ours.loss(batch([[0, 1, 2] * 7], [(16, 16)]))
    loss.backward()
    assert loss.isfinite()


@kinds
def test_a_model_all_in_bfloat16_learns(kind: dict[str, Any]) -> None:
    ours = module(**kind).train().bfloat16()
    whole = batch([[0, 2, 1], [1, -1, -1]], [(32, 24), (24, 32)])
    torch.set_default_dtype(torch.bfloat16)  # as the trainer does
    try:
        loss = ours.loss(whole | {name: whole[name].bfloat16() for name in ("image", "boxes")})
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in ours.model.parameters())


@torch.no_grad()
@kinds
def test_training_learns_what_evaluation_measures(kind: dict[str, Any]) -> None:
    """Of an image alone and without denoising and proposals, both are the same sum."""
    ours = module(**(kind | {"denoising": 0})).eval()
    image = batch([[0, 2]], [(32, 24)])
    trained = ours.loss(image)
    ours.evaluate(image, ours.val_metrics)
    last = ours.val_metrics["loss"].compute()
    assert last > 0
    assert trained > last, "of every layer"


@torch.no_grad()
@kinds
def test_an_evaluation_does_not_depend_on_the_other_images_of_a_batch(kind: dict[str, Any]) -> None:
    ours = module(**kind).eval()
    sizes = [(32, 24), (40, 16), (32, 24), (9, 9), (40, 16)]
    whole = batch([[0, 1], [2, -1], [-1, -1], [1, 1], [2, 0]], sizes)
    together = ours.by_size(whole["image"], whole["valid"])
    losses = []
    for index in range(len(sizes)):
        one = only(whole, index)
        alone = ours.model(one["image"])
        for part, wanted in zip(together, alone, strict=True):
            torch.testing.assert_close(part[index : index + 1], wanted, rtol=1e-4, atol=1e-5)
        ours.evaluate(one, ours.test_metrics)
        losses.append(ours.test_metrics["loss"].compute())
        ours.test_metrics.reset()
    ours.evaluate(whole, ours.val_metrics)
    torch.testing.assert_close(ours.val_metrics["loss"].compute(), torch.stack(losses).mean(), rtol=1e-4, atol=1e-5)


def test_the_backbone_learns_at_a_rate_of_its_own() -> None:
    ours = module(lr=2e-3, backbone_lr=0.1)
    rates: dict[int, float] = {}
    for group in ours.optimizer_groups():
        rates |= {id(parameter): group["lr"] for parameter in group["params"]}
    for name, parameter in ours.model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(2e-4 if name.startswith("backbone.") else 2e-3), name
    assert len({group["lr"] for group in module(backbone_lr=1.0).optimizer_groups()}) == 1


def test_learned_boxes_take_no_weight_decay() -> None:
    ours = module(queries="boxes")
    (boxes,) = [value for name, value in ours.model.named_parameters() if name == "queries.boxes"]
    (group,) = [group for group in ours.optimizer_groups() if any(boxes is value for value in group["params"])]
    assert group["weight_decay"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backbone_lr": -0.1}, "backbone_lr is -0.1, expected at least 0"),
        ({"no_object": 0.0}, "no_object is 0.0, expected a weight in (0, 1]"),
        ({"cost_class": -1.0}, "cost_class is -1.0, expected at least 0"),
        ({"weight_class": 0.0}, "weight_class is 0.0, expected more than 0"),
        ({"label_noise": 1.5}, "label_noise is 1.5, expected a probability"),
        ({"box_noise": float("nan")}, "box_noise is nan, expected a share in [0, 1]"),
    ],
)
def test_an_option_out_of_range_is_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        module(**options)


def test_a_backbone_starts_from_a_file(tmp_path: Path) -> None:
    source = module(backbone="resnet18")
    state = {name: value + 1 for name, value in source.model.backbone.state_dict().items()}
    state = {name.removeprefix("net."): value for name, value in state.items()}
    torch.save(state | {"fc.weight": torch.zeros(2, 2)}, tmp_path / "resnet18.pth")
    ours = module(backbone="resnet18", backbone_weights=str(tmp_path / "resnet18.pth"))
    loaded = ours.model.backbone.state_dict()
    assert all(torch.equal(loaded[f"net.{name}"], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("backbone", "content", "expected"),
    [
        ("resnet18", None, r"/w\.pth: no such file, expected weights of resnet18, or timm$"),
        ("resnet18", {"fc.weight": torch.zeros(2)}, r"/w\.pth, for the backbone resnet18: .*missing .*conv1\.weight"),
        ("resnet18", "text", r"/w\.pth: not a PyTorch file, expected a checkpoint written by torch\.save$"),
        ("conv", {}, r"/w\.pth: the backbone is 'conv', for which no weights are published, expected one of timm's$"),
    ],
)
def test_weights_of_a_backbone_that_cannot_be(backbone: str, content: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ValueError, match=expected) as raised:
        module(backbone=backbone, backbone_weights=str(path))
    assert "\n" not in str(raised.value)
