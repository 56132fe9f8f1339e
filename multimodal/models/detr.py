"""DETR ("End-to-End Object Detection with Transformers", Carion et al. 2020), and what makes it converge faster.

B batch, (H, W) image size, (h, w) size of the feature map, N = h·w tokens, Q queries, L decoder layers, D embed_dim,
C outputs of the class head. Boxes are (centre x, centre y, width, height) as shares of the image's own width and
height, without its padding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks import Stack, StackConfig, sine_2d
from multimodal.blocks.backbone import build_backbone
from multimodal.blocks.queries import BoxHead, BoxQueries, ClassHead, LearnedQueries, Noised, Proposals, token_places

LAYERS: dict[str, Any] = {
    "embed_dim": 256,
    "depth": 6,
    "num_heads": 8,
    "mlp_ratio": 8.0,
    "activation": "relu",
    "norm_order": "post",
    "dropout": 0.1,
    "mlp_dropout": 0.1,
    "init": "detr",
}
"""The published encoder and decoder layers."""
ENCODER, DECODER = StackConfig(**LAYERS, final_norm=False), StackConfig(**LAYERS)


@dataclass(frozen=True, kw_only=True)
class DETRConfig:
    """A DETR. As it stands it is the published detr-resnet-50."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"denoising"})

    num_classes: int = 91
    """Classes, without the published head's "no object"."""
    num_queries: int = 100
    """Most objects that can be found in an image."""
    backbone: str = "resnet50"
    """A model of timm that gives features, with frozen batch norms; or conv, a small one for small images."""
    backbone_stage: int = -1
    """Which of the backbone's feature maps, counted from the end: -1 = the coarsest, -2 = the one before it."""
    dilation: bool = False
    """The backbone's last stage dilated instead of strided (DC5): twice the resolution."""
    encoder: StackConfig = ENCODER
    """The encoder's layers."""
    decoder: StackConfig = DECODER
    """The decoder's layers; of the same embed_dim."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How classes are scored: softmax against "no object" (DETR), or each by itself, for the focal loss."""
    queries: Literal["learned", "boxes", "proposed"] = "learned"
    """What a query is: a learned vector; a learned box that each layer refines ("DAB-DETR", Liu et al. 2022); or such a
    box proposed by the encoder's tokens ("Deformable DETR", Zhu et al. 2021, section 4.2)."""
    modulated: bool = False
    """Each head of cross-attention looks at one part of a query's box ("Spatially Modulated Co-Attention", Gao et al.
    2021); needs queries that are boxes."""
    denoising: int = 0
    """Most noised true boxes that training has the decoder restore in an image ("DN-DETR", Li et al. 2022); needs
    queries that are boxes."""

    def __post_init__(self) -> None:
        for name, least in (("num_classes", 1), ("num_queries", 1), ("denoising", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if self.backbone_stage >= 0:
            raise ValueError(f"backbone_stage is {self.backbone_stage}, expected -1 (the coarsest map), -2, …")
        if self.encoder.embed_dim != self.decoder.embed_dim:
            raise ValueError(
                f"encoder.embed_dim is {self.encoder.embed_dim} and decoder.embed_dim {self.decoder.embed_dim}, "
                "expected the same"
            )
        if self.decoder.rope:
            raise ValueError(f"decoder.rope is {self.decoder.rope!r}, expected null: queries have no order")
        if self.decoder.embed_dim % 4:
            raise ValueError(f"decoder.embed_dim is {self.decoder.embed_dim}, expected a multiple of 4")
        for name in ("modulated", "denoising"):
            if getattr(self, name) and self.queries == "learned":
                raise ValueError(f"{name} is {getattr(self, name)} with queries 'learned', expected boxes or proposed")

    @property
    def num_outputs(self) -> int:
        """Width of the class head: softmax scores "no object" as well, as its last."""
        return self.num_classes + (self.scores == "softmax")


class DETROutput(NamedTuple):
    """What a DETR finds."""

    logits: Tensor
    """[B, Q, C]."""
    boxes: Tensor
    """[B, Q, 4], in 0 … 1."""


class DETRLayers(NamedTuple):
    """What every part of a DETR finds, for the auxiliary losses."""

    logits: Tensor
    """Of each decoder layer, [L, B, Q, C]."""
    boxes: Tensor
    """Of each decoder layer, [L, B, Q, 4]."""
    proposals: Proposals | None
    """Of the encoder's tokens, where these propose the queries."""


class DETR(nn.Module):
    """Images of any size to a fixed number of scored boxes."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.config = config
        dim, sigmoid = config.decoder.embed_dim, config.scores == "sigmoid"
        self.backbone = build_backbone(config.backbone, stage=config.backbone_stage, dilation=config.dilation)
        self.input_proj = nn.Conv2d(self.backbone.channels, dim, 1)
        self.encoder = Stack(config.encoder)
        self.decoder = Stack(config.decoder, context_dim=dim)
        self.queries: LearnedQueries | BoxQueries
        if config.queries == "learned":
            self.queries = LearnedQueries(config.num_queries, dim)
        else:
            self.queries = BoxQueries(
                config.num_queries,
                dim,
                num_heads=config.decoder.num_heads,
                depth=config.decoder.depth if config.modulated else 0,
                num_classes=config.num_classes if config.denoising else 0,
                num_outputs=config.num_outputs if config.queries == "proposed" else None,
                sigmoid=sigmoid,
            )
        self.class_head = ClassHead(dim, config.num_outputs, sigmoid=sigmoid)
        self.box_head = BoxHead(dim, refines=config.queries != "learned")

    def forward(
        self,
        images: Tensor,
        valid: Tensor | None = None,
        noised: Noised | None = None,
        *,
        all_layers: bool = False,
    ) -> DETROutput | DETRLayers:
        """Find objects.

        Args:
            images: normalised, [B, 3, H, W], padded on the right and below with zeros.
            valid: bool [B, H, W], True = a pixel of the image, False = padding; None = no padding.
            noised: true boxes with noise, for training with `denoising`; their outputs come first.
            all_layers: return what every decoder layer finds, for the auxiliary losses (section A.4).
        """
        memory, real = self.encode(images, valid)
        return self.decode(memory, real, noised, padded=valid is not None, all_layers=all_layers)

    def encode(self, images: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] to memory [B, N, D], and which of it is no padding, bool [B, h, w]."""
        features = self.input_proj(self.backbone(images))
        size = features.shape[-2:]
        if valid is None:
            real = features.new_ones((images.shape[0], *size), dtype=torch.bool)
        else:
            real = F.interpolate(valid[:, None].float(), size=size)[:, 0].bool()
        key_mask = None if valid is None else real.flatten(1)
        pos = self._positions(real, features)
        return self.encoder(features.flatten(2).transpose(1, 2), pos=pos, key_mask=key_mask).last, real

    def decode(
        self,
        memory: Tensor,
        real: Tensor,
        noised: Noised | None = None,
        *,
        padded: bool = True,
        all_layers: bool = False,
    ) -> DETROutput | DETRLayers:
        """What `encode` returns to scored boxes; `padded` = False where nothing is padding. See `forward`."""
        places = token_places(real)
        x, boxes, proposals = self.queries.start(memory, places, noised)
        inputs: dict[str, Any] = {
            "context": memory,
            "context_pos": self._positions(real, memory),
            "context_key_mask": real.flatten(1) if padded else None,
        }
        if noised is not None:
            own = x.shape[1] - noised.real.shape[1]
            inputs |= {"key_mask": F.pad(noised.real, (0, own), value=True), "mask": noised.mask}
        found: list[DETROutput] = []
        for index, block in enumerate(self.decoder.blocks):
            x = self.decoder.run_block(block, x, inputs | self.queries.guide(index, x, boxes, places)).tokens
            last = index == self.config.decoder.depth - 1
            if not (all_layers or last or boxes is not None):
                continue
            h = self.decoder.norm(x)
            refined = self.box_head(h, boxes)
            if all_layers or last:
                found.append(DETROutput(self.class_head(h), refined))
            boxes = None if boxes is None else refined.detach()
        if not all_layers:
            return found[-1]
        logits, refined = (torch.stack(part) for part in zip(*found, strict=True))
        return DETRLayers(logits, refined, proposals)

    def _positions(self, real: Tensor, like: Tensor) -> Tensor:
        return sine_2d(real, self.config.encoder.embed_dim).to(like.dtype)

    def no_weight_decay(self) -> set[str]:
        """Parameters besides norms and biases that take no weight decay."""
        return {"queries.boxes"}
