"""The Lightning module of object detection."""

from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.models.detr import DETR, DETRConfig, DETRLayers, DETROutput
from multimodal.pretrained import Checkpoint, load_weights
from multimodal.pretrained.backbone import load_backbone
from tasks.base import Batch, TaskModule, mean_over_processes
from tasks.detr.classes import map_classes, matching
from tasks.detr.criterion import SetCriterion, cardinality_error, class_error
from tasks.detr.denoising import add_noise, denoising_pairs
from tasks.detr.matcher import HungarianMatcher, Pairs, Targets, nearest_tokens, xyxy
from tasks.detr.metrics import CocoAP
from tasks.detr.postprocess import detections

FEW_IMAGES = 1000
"""So many do not teach a plain DETR anything, as its users report; its paper has 118,000, 300 to 500 times over."""


class DETRModule(TaskModule):
    """A DETR that learns to find objects."""

    task = "detr"
    model: DETR

    def build(
        self,
        *,
        backbone_weights: str | None = None,
        backbone_lr: float = 0.1,
        no_object: float = 0.1,
        cost_class: float = 1.0,
        weight_class: float = 1.0,
        label_noise: float = 0.2,
        box_noise: float = 0.4,
        **model: Any,
    ) -> DETR:
        """The model.

        Args:
            backbone_weights: Weights that the backbone starts from: a file of timm's, or timm for those that it
                downloads; None = random ones.
            backbone_lr: Factor on the backbone's learning rate.
            no_object: Weight of "no object" in the cross-entropy; with softmax scores.
            cost_class: Weight of the class score in the matching, beside 5 for L1 and 2 for the generalised IoU.
            weight_class: Weight of the class loss, beside 5 for L1 and 2 for the generalised IoU.
            label_noise: Probability that a denoising query has a wrong class.
            box_noise: How far a denoising query's box is off, as a share of its sides.
        """
        for name, value, right, expected in (
            ("backbone_lr", backbone_lr, backbone_lr >= 0, "at least 0"),
            ("no_object", no_object, 0 < no_object <= 1, "a weight in (0, 1]"),
            ("cost_class", cost_class, cost_class >= 0, "at least 0"),
            ("weight_class", weight_class, weight_class > 0, "more than 0"),
            ("label_noise", label_noise, 0 <= label_noise <= 1, "a probability"),
            ("box_noise", box_noise, 0 <= box_noise <= 1, "a share in [0, 1]"),
        ):
            if not right:
                raise ValueError(f"{name} is {value}, expected {expected}")
        detr = DETR(DETRConfig(**model))
        if backbone_weights is not None:
            load_backbone(detr.backbone, backbone_weights)
        scores = detr.config.scores
        self.matcher = HungarianMatcher(scores, cost_class=cost_class)
        self.criterion = SetCriterion(scores, no_object=no_object, weight_class=weight_class)
        self.noise = {"label_noise": label_noise, "box_noise": box_noise}
        self.backbone_lr = backbone_lr
        self.pretrained = False
        return detr

    def loss(self, batch: Batch) -> Tensor:
        config, targets = self.model.config, targets_of(batch)
        valid = None if bool(batch["valid"].all()) else batch["valid"]
        noised, source = None, targets.labels[:, :0]
        if config.denoising:
            noised, source = add_noise(targets, config.denoising, config.num_classes, config.num_queries, **self.noise)
        found: DETRLayers = self.model(batch["image"], valid, noised, all_layers=True)
        count = source.shape[1]
        own = DETROutput(found.logits[:, :, count:], found.boxes[:, :, count:])
        loss = self._total(own, targets, self.matcher(own, targets))
        if noised is not None:
            restored = DETROutput(found.logits[:, :, :count], found.boxes[:, :, :count])
            groups = count // min(targets.labels.shape[1], config.denoising)
            pairs = denoising_pairs(noised, source, len(found.logits))
            loss = loss + self._total(restored, targets, pairs, real=noised.real, repeats=groups)
        if found.proposals is not None:
            proposed = DETROutput(found.proposals.logits[None], found.proposals.boxes[None])
            pairs = nearest_tokens(found.proposals.places, targets)
            loss = loss + self._total(proposed, targets, pairs)
        return loss

    def _total(self, output: DETROutput, targets: Targets, pairs: Pairs, **options: Any) -> Tensor:
        losses = self.criterion(output, targets, pairs, over_processes=mean_over_processes, **options)
        return self.criterion.total(losses)

    def on_fit_start(self) -> None:
        images = len(self.trainer.datamodule.datasets["train"])  # type: ignore[attr-defined]
        if self.model.config.queries == "learned" and not self.pretrained and images < FEW_IMAGES:
            rank_zero_warn(
                f"{images} training images from scratch: the plain DETR hardly learns from so few; configs/detr.yaml "
                "and configs/detr_bccd.yaml (box queries, denoising, a pretrained backbone) do, or start with --init"
            )

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for metrics in (self.val_metrics, self.test_metrics):
            metrics["coco"].labels = self.trainer.datamodule.labels  # type: ignore[attr-defined]

    def metrics_of(self) -> dict[str, Metric]:
        return {
            "loss": MeanMetric(nan_strategy="disable"),
            "cardinality_error": MeanMetric(nan_strategy="disable"),
            "class_error": MeanMetric(nan_strategy="disable"),
            "coco": CocoAP(None),
        }

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        output = self.by_size(batch["image"], batch["valid"])
        targets, scores = targets_of(batch), self.model.config.scores
        for i in range(len(targets.labels)):  # each by itself, so that means do not depend on which are in a batch
            found = DETROutput(*(part[None, i : i + 1] for part in output))
            wanted = Targets(*(part[i : i + 1] for part in targets))
            pairs = self.matcher(found, wanted)
            metrics["loss"].update(self.criterion.total(self.criterion(found, wanted, pairs)))
            if len(pairs.query):
                metrics["class_error"].update(class_error(found.logits, wanted, pairs))
            metrics["cardinality_error"].update(cardinality_error(found.logits, wanted, scores))
        metrics["coco"].update(detections(output, batch["size"], scores=scores), _in_pixels(batch))

    def by_size(self, images: Tensor, valid: Tensor) -> DETROutput:
        """The outputs for a padded batch as for each image alone: convolutions would see the padding of the others.

        A model that is divided among processes is called once, padding and all: they must call it equally often.
        """
        if self.device_mesh is not None:
            return self.model(images, valid)
        rows, columns = valid.any(2).sum(1).tolist(), valid.any(1).sum(1).tolist()
        groups: dict[tuple[int, int], list[int]] = {}
        for index, size in enumerate(zip(rows, columns, strict=True)):
            groups.setdefault(size, []).append(index)
        outputs = [self.model(images[members, :, :h, :w]) for (h, w), members in groups.items()]
        order = torch.tensor([index for members in groups.values() for index in members]).argsort().to(images.device)
        return DETROutput(*(torch.cat(parts)[order] for parts in zip(*outputs, strict=True)))

    def lr_scale(self, name: str) -> float:
        return self.backbone_lr if name.startswith("backbone.") else 1.0

    def load_pretrained(self, checkpoint: Checkpoint, where: str, labels: list[str] | None = None) -> None:
        """Load the weights; classes are mapped by name, and those that the checkpoint lacks get new rows of the head.

        Where the checkpoint names no classes, it has the same ones if it has as many.
        """
        self.pretrained = True
        state, had = checkpoint.state_dict, checkpoint.config["num_classes"]
        if labels is None:
            load_weights(self.model, state, where)
            return
        known = checkpoint.labels or (labels if had == len(labels) else [])
        classes = {i: i for i in range(len(labels))} if labels == known else matching(labels, known)
        softmax = checkpoint.config["scores"] == self.model.config.scores == "softmax"
        state = map_classes(state, self.model.state_dict(), classes, no_object=softmax)
        load_weights(self.model, state, where)
        if labels != known:
            rank_zero_info(f"{where}: {len(classes)} of {len(labels)} classes are among its own; the others start anew")


def targets_of(batch: Batch) -> Targets:
    """The objects of a batch."""
    return Targets(batch["labels"], batch["boxes"].float(), batch["crowd"])


def _in_pixels(batch: Batch) -> list[dict[str, Tensor]]:
    """The objects and crowds of each image, as `CocoAP` takes them."""
    height, width = batch["size"].unbind(1)
    corners = xyxy(batch["boxes"]) * torch.stack([width, height, width, height], 1)[:, None]
    wanted = []
    for i, labels in enumerate(batch["labels"]):
        real = labels >= 0
        values = {"boxes": corners[i], "labels": labels, "crowd": batch["crowd"][i], "area": batch["area"][i]}
        wanted.append({"image_id": batch["image_id"][i], **{name: value[real] for name, value in values.items()}})
    return wanted
