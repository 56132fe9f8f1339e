"""The Lightning module of image classification."""

from typing import Any

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint, build_config, load_weights
from tasks.base import Batch, TaskModule


class ViTModule(TaskModule):
    """A Vision Transformer that classifies images."""

    task = "vit"
    model: ViT

    def build(self, *, label_smoothing: float = 0.0, **model: Any) -> ViT:
        """The model.

        Args:
            label_smoothing: Share of each target that is spread over all classes.
        """
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected a share in [0, 1)")
        self.label_smoothing = label_smoothing
        return ViT(ViTConfig(**model))

    def loss(self, batch: Batch) -> Tensor:
        logits, labels = self.model(batch["image"]), batch["label"]
        if logits.dim() == 3:  # a distilled model trains both of its heads
            logits, labels = logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1])
        return cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

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
