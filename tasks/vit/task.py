"""The Lightning module of image classification."""

from typing import Any, Literal

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchvision.transforms import v2

from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint, build_config, load_weights
from tasks.base import Batch, TaskModule

Criterion = Literal["cross_entropy", "binary_cross_entropy"]


class ViTModule(TaskModule):
    """A Vision Transformer that classifies images."""

    task = "vit"
    model: ViT

    def build(
        self,
        *,
        criterion: Criterion = "cross_entropy",
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_probability: float = 1.0,
        **model: Any,
    ) -> ViT:
        """The model.

        Args:
            criterion: The training loss; binary_cross_entropy asks of each class by itself whether it is in the image
                (DeiT III, Touvron et al. 2022), of which a mixed image has two.
            label_smoothing: Share of each target that is spread over all classes.
            mixup: Alpha of mixup's Beta distribution (Zhang et al. 2018); 0 = none. Beside cutmix either is as likely.
            cutmix: Alpha of CutMix's Beta distribution (Yun et al. 2019); 0 = none.
            mix_probability: Share of the batches that are mixed.
        """
        for name, value, right, expected in (
            ("label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "a share in [0, 1)"),
            ("mixup", mixup, 0 <= mixup < float("inf"), "at least 0"),
            ("cutmix", cutmix, 0 <= cutmix < float("inf"), "at least 0"),
            ("mix_probability", mix_probability, 0 <= mix_probability <= 1, "a share in [0, 1]"),
        ):
            if not right:
                raise ValueError(f"{name} is {value}, expected {expected}")
        self.criterion = criterion
        self.label_smoothing = label_smoothing
        vit = ViT(ViTConfig(**model))
        classes = vit.config.num_classes
        mixers = [mixer(alpha=a, num_classes=classes) for mixer, a in ((v2.MixUp, mixup), (v2.CutMix, cutmix)) if a]
        self.mix = v2.RandomApply([v2.RandomChoice(mixers)], p=mix_probability) if mixers else None
        return vit

    def loss(self, batch: Batch) -> Tensor:
        images, targets = batch["image"], batch["label"]
        if self.mix is not None:
            images, targets = self.mix(images, targets)  # targets [B], or [B, num_classes] where the batch is mixed
        logits = self.model(images)
        if logits.dim() == 3:  # a distilled model trains both of its heads
            targets = targets.repeat_interleave(logits.shape[1], dim=0)
            logits = logits.flatten(0, 1)
        if self.criterion == "binary_cross_entropy":
            return self._binary(logits.float(), targets)
        return cross_entropy(logits.float(), targets, label_smoothing=self.label_smoothing)

    def _binary(self, logits: Tensor, targets: Tensor) -> Tensor:
        classes = logits.shape[1]
        present = (one_hot(targets, classes) if targets.dim() == 1 else targets > 0).to(logits.dtype)
        smoothed = present * (1 - self.label_smoothing) + self.label_smoothing / classes
        return binary_cross_entropy_with_logits(logits, smoothed)

    def metrics_of(self) -> dict[str, Metric]:
        names = ["loss", "accuracy"] + ["top5"] * (self.model.config.num_classes > 5)
        return {name: MeanMetric(nan_strategy="disable") for name in names}

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        logits, labels = self.model(batch["image"]).float(), batch["label"]
        metrics["loss"].update(cross_entropy(logits, labels, reduction="none"))
        metrics["accuracy"].update(_in_top(logits, labels, 1))
        if "top5" in metrics:
            metrics["top5"].update(_in_top(logits, labels, 5))

    def load_pretrained(self, checkpoint: Checkpoint, where: str, labels: list[str] | None = None) -> None:
        """Load the weights, with the positions resized to this model's grid; other classes get a new head."""
        state = self.model.adapt_state_dict(checkpoint.state_dict, build_config(self.task, checkpoint.config, where))
        if labels is not None and not _same_classes(checkpoint, labels):
            new_head = {name: value for name, value in self.model.state_dict().items() if _in_head(name)}
            state = {name: value for name, value in state.items() if not _in_head(name)} | new_head
            had = checkpoint.config["num_classes"]
            rank_zero_info(f"The head for the checkpoint's {had} classes is replaced by a new one for {len(labels)}.")
        load_weights(self.model, state, where)


def _in_top(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """For each row, 1 where the label is among the k largest logits."""
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(dim=1).float()


def _in_head(name: str) -> bool:
    return name.startswith(("head.", "distilled_head."))


def _same_classes(checkpoint: Checkpoint, labels: list[str]) -> bool:
    if checkpoint.labels is None:
        return bool(checkpoint.config["num_classes"] == len(labels))
    return checkpoint.labels == labels
