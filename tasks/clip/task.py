"""The Lightning module of contrastive image-text training."""

from typing import Any, Self

import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from multimodal.models.clip import CLIP, CLIPConfig
from multimodal.pretrained import Checkpoint, build_config, load_weights
from tasks.base import Batch, TaskModule
from tasks.clip import towers
from tasks.clip.losses import LossKind, pair_loss
from tasks.clip.metrics import Retrieval

_BIAS = "logit_bias"


class CLIPModule(TaskModule):
    """A CLIP that learns which texts belong to which images."""

    task = "clip"
    model: CLIP

    def build(
        self,
        *,
        criterion: LossKind = "infonce",
        local_loss: bool = False,
        micro_batch: int | None = None,
        init_vision: str | None = None,
        init_text: str | None = None,
        lock_image: bool = False,
        lock_text: bool = False,
        **model: Any,
    ) -> CLIP:
        """The model.

        Args:
            criterion: The training loss; infonce asks for the right one of all the batch's texts and images (Radford
                et al. 2021), sigmoid of each pair by itself whether it belongs together (SigLIP, Zhai et al. 2023),
                which needs a logit_bias.
            local_loss: Each of several processes computes the logits of its own images and texts alone, in place of
                all: the same loss and gradients in less memory.
            micro_batch: Images, or texts, that go through a tower at a time, and again in the backward pass: the loss
                and gradients of the whole batch in the memory of so many; None = all at once.
            init_vision: What the image tower starts from, which then has that one's architecture: a checkpoint of the
                task vit, timm:NAME, or a CLIP.
            init_text: What the text tower starts from, which then has that one's architecture: a CLIP.
            lock_image: Leave the image tower as it is, and in evaluation mode (LiT, Zhai et al. 2022).
            lock_text: Leave the text tower as it is, and in evaluation mode. A random one will do: it tells words
                apart, and a phrase is nearly the sum of its words, both of which a tower that is trained forgets
                while the images mean nothing yet.
        """
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}, expected at least 1")
        if lock_image and lock_text:
            raise ValueError("lock_image and lock_text are both true, which leaves nothing to train but projections")
        vision = None if init_vision is None else towers.read_vision(init_vision)
        text = None if init_text is None else towers.read_text(init_text)
        config = CLIPConfig(**model)
        if criterion == "sigmoid" and config.logit_bias is None:
            raise ValueError("logit_bias is null, expected a number such as -10 with criterion sigmoid")
        if vision is not None:
            model["vision"] = towers.adopt_vision(vision, config.vision)
        if text is not None:
            model["text"] = towers.adopt_text(text, config.text)
        clip = CLIP(CLIPConfig(**model))
        towers.fill(clip, vision, text)
        clip.vision.requires_grad_(not lock_image)
        clip.text.requires_grad_(not lock_text)
        self.criterion = criterion
        self.local_loss = local_loss
        self.micro_batch = micro_batch
        self.lock_image = lock_image
        self.lock_text = lock_text
        self.vision = vision
        self.pretrained = vision is not None
        return clip

    def loss(self, batch: Batch) -> Tensor:
        output = self.model(batch["image"], batch["tokens"], micro_batch=self.micro_batch)
        return pair_loss(
            output,
            batch["image_id"],
            batch["caption_id"],
            kind=self.criterion,
            local=self.local_loss,
            world_size=self._world_size,
        )

    @property
    def _world_size(self) -> int:
        return 1 if self._trainer is None else self.trainer.world_size

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.lock_image:
            self.model.vision.eval()
        if self.lock_text:
            self.model.text.eval()
        return self

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":
            self._check_colors()

    def _check_colors(self) -> None:
        had = self.vision.preprocess if self.vision else None
        now = self.trainer.datamodule.preprocess.to_dict()  # type: ignore[attr-defined]
        if had and (different := [name for name in ("mean", "std") if name in had and had[name] != now[name]]):
            assert self.vision is not None
            told = " and ".join(f"data.{name} {had[name]}" for name in different)
            rank_zero_warn(f"{self.vision.source} was trained with {told}, not {[now[name] for name in different]}")

    def on_fit_start(self) -> None:
        if self.lock_image and not self.pretrained and self.trainer.ckpt_path is None:
            raise ValueError("lock_image needs init_vision or --init: without it random weights would be locked")
        pairs = self.trainer.datamodule.batch_size * self._world_size  # type: ignore[attr-defined]
        if pairs < 2:
            raise ValueError(
                "data.batch_size is 1, of which nothing can be learned: expected at least 2 pairs to contrast"
            )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.limit_logit_scale()

    def metrics_of(self) -> dict[str, Metric]:
        return {"retrieval": Retrieval(self.model.config.embed_dim)}

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        output = self.model(batch["image"], batch["tokens"])
        # In bfloat16 their length is 1 to three digits only.
        images, texts = (F.normalize(features.float(), dim=-1) for features in output[:2])
        metrics["retrieval"].update(
            images, batch["image_id"], texts, batch["caption_id"], batch["caption_of"], output.logit_scale
        )

    def load_pretrained(self, checkpoint: Checkpoint, where: str, labels: list[str] | None = None) -> None:
        """Load the weights, with the image tower's positions resized to this model's grid.

        A bias of the logits that the checkpoint lacks starts anew, and one that this model lacks is left out.
        """
        state = self.model.adapt_state_dict(checkpoint.state_dict, build_config(self.task, checkpoint.config, where))
        own = {name: value for name, value in self.model.state_dict().items() if name == _BIAS}
        had = {name: value for name, value in state.items() if name != _BIAS or own}
        load_weights(self.model, {**own, **had}, where)
        self.pretrained = True
