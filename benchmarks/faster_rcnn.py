"""Faster R-CNN of torchvision as the baseline for configs/detr_bccd.yaml: same data, backbone and time of training.

    python benchmarks/faster_rcnn.py --root BCCD --weights tf_efficientnet_lite0.safetensors --minutes 30 --seed 0

The split, sizes, augmentation and batches are the recipe's; so are the backbone, its weights and its frozen batch norms
(here in float32, under a pyramid of 128 channels). Training lasts --minutes of wall time, in which evaluation does not
count. The results go to OUT/frcnn-SEED.json: AP on val over the seconds, and that of the last weights on val and test.
"""

import argparse
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import timm
import torch
import yaml
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, box_convert
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from multimodal.blocks.frozen_norm import fold_norms
from multimodal.pretrained.files import read_weights
from multimodal.pretrained.keymap import check_keys
from tasks.detr.augment import DetectionAugmentation
from tasks.detr.data import DetectionData
from tasks.detr.metrics import CocoAP
from tasks.optim import parameter_groups, warmup_cosine

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "detr_bccd.yaml"
LR, BACKBONE_LR, WEIGHT_DECAY, WARMUP, CLIP = 3e-4, 0.2, 1e-4, 0.05, 1.0
CHANNELS = 128
ANCHORS = (32, 64, 128, 256)
"""Pixels, at strides 8, 16, 32 and 64."""
EVALUATIONS = 10
GRAIN = 10_000
"""Parts of the time budget: what the schedule takes for steps."""
Batch = dict[str, Tensor]


class Pyramid(nn.Module):
    """Images to maps at strides 8, 16, 32 and 64, from a timm backbone with frozen batch norms."""

    def __init__(self, name: str, weights: Path) -> None:
        super().__init__()
        self.net = freeze_batch_norm_2d(timm.create_model(name, features_only=True, out_indices=(2, 3, 4)))
        fold_norms(self.net, 3)
        expected = self.net.state_dict()
        state = {key: value for key, value in read_weights(weights).items() if key in expected}
        check_keys(state, expected, str(weights))
        self.net.load_state_dict(state)
        self.fpn = FeaturePyramidNetwork(self.net.feature_info.channels(), CHANNELS, LastLevelMaxPool())
        self.out_channels = CHANNELS

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        maps = self.net(images.contiguous(memory_format=torch.channels_last))
        return self.fpn(OrderedDict((str(level), features) for level, features in enumerate(maps)))


def build(name: str, weights: Path, data: DetectionData) -> FasterRCNN:
    return FasterRCNN(
        Pyramid(name, weights),
        data.num_classes + 1,
        rpn_anchor_generator=AnchorGenerator(tuple((size,) for size in ANCHORS), ((0.5, 1.0, 2.0),) * len(ANCHORS)),
        rpn_pre_nms_top_n_train=1000,
        rpn_post_nms_top_n_train=500,
        rpn_post_nms_top_n_test=500,
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], output_size=7, sampling_ratio=2),
        box_batch_size_per_image=128,
        box_score_thresh=0.01,
        # The images come resized, as its own transform would, and normalised; augmented ones have sizes of their own.
        min_size=data.preprocess.shortest_edge,
        max_size=data.preprocess.longest_edge,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        _skip_resize=True,  # in training alone
    )


def cropped(batch: Batch) -> tuple[list[Tensor], Tensor]:
    """The images of a batch without their padding, and their sizes [B, 2]."""
    sizes = torch.stack([batch["valid"].any(2).sum(1), batch["valid"].any(1).sum(1)], 1)
    return [image[:, :h, :w] for image, (h, w) in zip(batch["image"], sizes.tolist(), strict=True)], sizes


def true_boxes(batch: Batch, sizes: Tensor) -> list[Batch]:
    """What is in each image, with boxes as x0, y0, x1, y1 in pixels of images of these heights and widths [B, 2]."""
    boxes = box_convert(batch["boxes"], "cxcywh", "xyxy") * sizes.flip(1).repeat(1, 2)[:, None]
    columns = {"boxes": boxes, **{name: batch[name] for name in ("labels", "crowd", "area")}}
    real = batch["labels"] >= 0
    return [
        {"image_id": image_id} | {name: column[index][real[index]] for name, column in columns.items()}
        for index, image_id in enumerate(batch["image_id"])
    ]


def target(true: Batch) -> Batch:
    """What Faster R-CNN trains on, whose class 0 is the background."""
    kept = ~true["crowd"] & (true["boxes"][:, 2:] > true["boxes"][:, :2]).all(1)
    return {"boxes": true["boxes"][kept], "labels": true["labels"][kept] + 1}


@torch.inference_mode()
def evaluate(model: FasterRCNN, batches: Iterable[Batch]) -> dict[str, float]:
    model.eval()
    metric = CocoAP()
    for batch in batches:
        images, sizes = cropped(batch)
        scale = (batch["size"] / sizes).flip(1).repeat(1, 2)
        # Each alone, since padding would change what is found.
        found = [model([image])[0] for image in images]
        shown = [
            {"scores": one["scores"], "labels": one["labels"] - 1, "boxes": one["boxes"] * factor}
            for one, factor in zip(found, scale, strict=True)
        ]
        metric.update(shown, true_boxes(batch, batch["size"]))
    model.train()
    return {name: value.item() for name, value in metric.compute().items()}


def endless(loader: Any) -> Iterator[Batch]:
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def train(model: FasterRCNN, data: DetectionData, budget: float) -> list[tuple[float, float, float]]:
    """For `budget` seconds; returns seconds, AP and AP50 on val at each evaluation."""
    scale = {True: BACKBONE_LR, False: 1.0}
    groups = parameter_groups(
        model, lr=LR, weight_decay=WEIGHT_DECAY, lr_scale=lambda name: scale[name.startswith("backbone.net.")]
    )
    optimizer = torch.optim.AdamW(groups)
    curve: list[tuple[float, float, float]] = []
    steps, elapsed, start = 0, 0.0, time.perf_counter()
    factor = warmup_cosine(GRAIN, WARMUP)
    schedule = LambdaLR(optimizer, lambda _: factor(int(GRAIN * elapsed / budget)))
    val = data.val_dataloader()
    for batch in endless(data.train_dataloader()):
        images, sizes = cropped(batch)
        losses = model(images, [target(true) for true in true_boxes(batch, sizes)])
        optimizer.zero_grad()
        sum(losses.values()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, error_if_nonfinite=True)
        optimizer.step()
        steps, elapsed = steps + 1, time.perf_counter() - start
        schedule.step()
        if elapsed >= budget * (len(curve) + 1) / EVALUATIONS:
            paused = time.perf_counter()
            scores = evaluate(model, val)
            curve.append((elapsed, scores["AP"], scores["AP50"]))
            told = ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            print(
                f"{elapsed:.0f} s, {steps} steps: AP {scores['AP']:.4f}, AP50 {scores['AP50']:.4f}; {told}", flush=True
            )
            start += time.perf_counter() - paused
        if elapsed >= budget:
            return curve
    raise AssertionError("the epochs never end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="the data, as COCO's JSON with its images")
    parser.add_argument(
        "--weights", required=True, type=Path, help="a file of the backbone's weights, as timm has them"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="wall time of training, without evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bccd"), help="a folder for the results of the runs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pl.seed_everything(args.seed)
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    augment = DetectionAugmentation(**config["data"].pop("augment"))
    data = DetectionData(**config["data"], root=args.root, augment=augment)
    data.setup("fit")
    data.setup("test")
    model = build(config["model"]["backbone"], args.weights, data)
    curve = train(model, data, args.minutes * 60)
    test = {f"test_{name}": value for name, value in evaluate(model, data.test_dataloader()).items()}
    args.out.mkdir(parents=True, exist_ok=True)
    result = {"curve": curve, "AP": curve[-1][1], "AP50": curve[-1][2], **test}
    (args.out / f"frcnn-{args.seed}.json").write_text(json.dumps(result))
    print({name: value for name, value in result.items() if name != "curve"})


if __name__ == "__main__":
    main()
