"""DETR ("End-to-End Object Detection with Transformers", Carion et al. 2020), and what makes it converge faster.

B batch, (H, W) image size, (h, w) size of the feature map, N = h·w tokens, Q queries, L decoder layers, D embed_dim,
C outputs of the class head. Boxes are (centre x, centre y, width, height) as shares of the image's own width and
height, without its padding.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks import Stack, StackConfig, sine_2d
from multimodal.blocks.backbone import build_backbone
from multimodal.blocks.position import sine

PRIOR = 0.01
"""Score of every class before training, where classes are scored by sigmoids ("Focal Loss", Lin et al. 2017)."""
LAYERS = {
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
    dilation: bool = False
    """The backbone's last stage dilated instead of strided (DC5): twice the resolution."""
    encoder: StackConfig = StackConfig(**LAYERS, final_norm=False)
    """The encoder's layers."""
    decoder: StackConfig = StackConfig(**LAYERS)
    """The decoder's layers; of the same embed_dim."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How classes are scored: softmax against "no object" (DETR), or each by itself, for the focal loss."""
    queries: Literal["learned", "boxes", "selected"] = "learned"
    """What a query is: a learned vector, or a box that each layer refines ("DAB-DETR", Liu et al. 2022)."""
    modulation: Literal["none", "conditional", "gaussian"] = "none"
    """Cross-attention is led to a query's box: by the sines of its centre ("Conditional DETR", Meng et al. 2021), or by
    Gaussians around it, one a head ("Spatially Modulated Co-Attention", Gao et al. 2021); needs boxes."""
    denoising: int = 0
    """Groups of noised true boxes that training has the decoder restore ("DN-DETR", Li et al. 2022); needs boxes."""

    def __post_init__(self) -> None:
        for name in ("num_classes", "num_queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.encoder.embed_dim != self.decoder.embed_dim:
            raise ValueError(
                f"encoder.embed_dim is {self.encoder.embed_dim} and decoder.embed_dim {self.decoder.embed_dim}, "
                "expected the same"
            )
        if self.decoder.embed_dim % 4:
            raise ValueError(f"decoder.embed_dim is {self.decoder.embed_dim}, expected a multiple of 4")
        if self.denoising < 0:
            raise ValueError(f"denoising is {self.denoising}, expected at least 0")
        for name in ("modulation", "denoising"):
            if getattr(self, name) not in (0, "none") and self.queries == "learned":
                raise ValueError(f"{name} is {getattr(self, name)} with queries {self.queries!r}, expected 'boxes'")

    @property
    def num_outputs(self) -> int:
        """Width of the class head: softmax scores "no object" as well, as its last."""
        return self.num_classes + (self.scores == "softmax")


class DETROutput(NamedTuple):
    """What a DETR returns."""

    logits: Tensor
    """[B, Q, C], or those of all decoder layers [L, B, Q, C] where asked for."""
    boxes: Tensor
    """[B, Q, 4], or [L, B, Q, 4]: centre x, centre y, width, height in 0 … 1."""


class Noised(NamedTuple):
    """True boxes with noise, which the decoder is to restore; they stand before the model's own queries."""

    labels: Tensor
    """int64 [B, K]: a class, perhaps the wrong one."""
    boxes: Tensor
    """[B, K, 4], strictly within 0 … 1."""
    real: Tensor
    """bool [B, K]: False = nothing, since other images of the batch have more boxes."""
    mask: Tensor
    """bool [1, 1, K + Q, K + Q]: which queries may see which."""


class DETR(nn.Module):
    """Images of any size to a fixed number of scored boxes."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.decoder.embed_dim
        self.backbone = build_backbone(config.backbone, dilation=config.dilation)
        self.input_proj = nn.Conv2d(self.backbone.channels, dim, 1)
        self.encoder = Stack(config.encoder)
        self.decoder = Stack(config.decoder, context_dim=dim)
        self.queries = LearnedQueries(config) if config.queries == "learned" else BoxQueries(config)
        self.class_head = nn.Linear(dim, config.num_outputs)
        self.box_head = BoxHead(dim)
        if config.scores == "sigmoid":
            nn.init.constant_(self.class_head.bias, -math.log((1 - PRIOR) / PRIOR))
        if config.queries == "selected":
            self.propose_norm = nn.LayerNorm(dim)
            self.propose_class = nn.Linear(dim, config.num_outputs)
            self.propose_box = BoxHead(dim)
            nn.init.constant_(self.propose_class.bias, -math.log((1 - PRIOR) / PRIOR))
            nn.init.zeros_(self.propose_box.layers[-1].weight)
            nn.init.zeros_(self.propose_box.layers[-1].bias)
        if config.queries != "learned":  # each layer starts from the box that it is given
            nn.init.zeros_(self.box_head.layers[-1].weight)
            nn.init.zeros_(self.box_head.layers[-1].bias)

    def forward(
        self,
        images: Tensor,
        valid: Tensor | None = None,
        noised: Noised | None = None,
        *,
        all_layers: bool = False,
    ) -> DETROutput:
        """Find objects.

        Args:
            images: normalised, [B, 3, H, W], padded on the right and below with zeros.
            valid: bool [B, H, W], True = a pixel of the image, False = padding; None = no padding.
            noised: true boxes with noise, for training with `denoising`; their outputs come first.
            all_layers: return what every decoder layer finds, for the auxiliary losses (section A.4).
        """
        memory, valid, pos = self.encode(images, valid)
        return self.decode(memory, valid, pos, noised, all_layers=all_layers)

    def encode(self, images: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Images [B, 3, H, W] to memory [B, N, D], which of it is no padding, bool [B, h, w], and positions [B, N, D]."""
        features = self.input_proj(self.backbone(images))
        size = features.shape[-2:]
        if valid is None:
            valid = features.new_ones((images.shape[0], *size), dtype=torch.bool)
            padded = False
        else:
            valid = F.interpolate(valid[:, None].float(), size=size)[:, 0].bool()
            padded = True
        pos = sine_2d(valid, self.config.encoder.embed_dim).to(features.dtype)
        tokens = features.flatten(2).transpose(1, 2)  # [B, N, D]
        memory = self.encoder(tokens, pos=pos, key_mask=valid.flatten(1) if padded else None).last
        return memory, valid, pos

    def decode(
        self, memory: Tensor, valid: Tensor, pos: Tensor, noised: Noised | None = None, *, all_layers: bool = False
    ) -> DETROutput:
        """What `encode` returns to scored boxes; see `forward`."""
        proposed = self.propose(memory, valid) if self.config.queries == "selected" else None
        x, boxes = self.queries.start(memory.shape[0], noised)  # not len, which an export takes for a constant
        if proposed is not None:
            boxes = torch.cat([boxes[:, : x.shape[1] - self.config.num_queries], proposed.boxes.detach()], 1)
        inputs: dict[str, Any] = {"context": memory, "context_pos": pos, "context_key_mask": valid.flatten(1)}
        if noised is not None:
            own = x.shape[1] - noised.real.shape[1]
            inputs |= {"key_mask": F.pad(noised.real, (0, own), value=True), "mask": noised.mask}
        found = []
        for index, block in enumerate(self.decoder.blocks):
            places = self.queries.places(index, x, boxes, valid)
            x = self.decoder.run_block(block, x, {**inputs, **places}).tokens
            last = index == len(self.decoder.blocks) - 1
            if all_layers or last or boxes is not None:
                h = self.decoder.norm(x)
                refined = self.box_head(h, boxes)
                if all_layers or last:
                    found.append((self.class_head(h), refined))
                boxes = None if boxes is None else refined.detach()
        logits, refined = (torch.stack(each) for each in zip(*found, strict=True)) if all_layers else found[-1]
        if all_layers and proposed is not None:
            return DETROutput(logits, refined), proposed
        return DETROutput(logits, refined)

    def propose(self, memory, valid):
        h = self.propose_norm(memory)
        logits = self.propose_class(h)
        place = grid(valid)
        anchors = torch.cat([place, torch.full_like(place, 0.2)], -1)
        boxes = self.propose_box(h, anchors)
        score = logits.max(-1).values.masked_fill(~valid.flatten(1), float("-inf"))
        best = score.topk(self.config.num_queries, dim=1).indices[..., None]
        return DETROutput(logits.gather(1, best.expand(-1, -1, logits.shape[-1])), boxes.gather(1, best.expand(-1, -1, 4)))

    def no_weight_decay(self) -> set[str]:
        """Parameters besides norms and biases that take no weight decay."""
        return {"queries.boxes"}


class BoxHead(nn.Module):
    """Three Linears to a box, or to the change of a box."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, 4)])

    def forward(self, x: Tensor, boxes: Tensor | None = None) -> Tensor:
        """Tokens [B, Q, D], and the boxes [B, Q, 4] to start from, to boxes [B, Q, 4]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        x = self.layers[-1](x).float()
        return (x if boxes is None else x + boxes.logit(eps=1e-5)).sigmoid()


class LearnedQueries(nn.Module):
    """A learned vector a query, added to the queries and keys of every layer; the tokens start at zero."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.num_queries, config.decoder.embed_dim)

    def start(self, batch: int, noised: Noised | None) -> tuple[Tensor, None]:
        """The first layer's tokens [B, Q, D]; no boxes."""
        return self.embed.weight.new_zeros(batch, *self.embed.weight.shape), None

    def places(self, index: int, x: Tensor, boxes: Tensor | None, valid: Tensor) -> dict[str, Tensor]:
        """What a decoder layer is told of where its queries are."""
        return {"pos": self.embed.weight[None]}


class BoxQueries(nn.Module):
    """A learned box a query, from which its position follows in every layer ("DAB-DETR", sections 4.1 to 4.4)."""

    TEMPERATURE = 20.0

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        dim, heads, depth = config.decoder.embed_dim, config.decoder.num_heads, config.decoder.depth
        self.dim, self.heads = dim, heads
        centres = torch.rand(config.num_queries, 2)
        sides = torch.full((config.num_queries, 2), 0.2)
        self.boxes = nn.Parameter(torch.cat([centres, sides], 1).logit(eps=1e-2))
        # A class for each noised box, and one vector for all queries that have no class yet.
        self.labels = nn.Embedding(config.num_classes + 1 if config.denoising else 1, dim)
        self.to_pos = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        kinds = {"conditional": ConditionalBias, "gaussian": GaussianBias}
        self.modulation = nn.ModuleList(
            kinds[config.modulation](dim, heads) for _ in range(depth if config.modulation != "none" else 0)
        )

    def start(self, batch: int, noised: Noised | None) -> tuple[Tensor, Tensor]:
        """The first layer's tokens [B, Q, D] and boxes [B, Q, 4]."""
        boxes = self.boxes.sigmoid().expand(batch, -1, -1)
        x = self.labels.weight[-1].expand(batch, boxes.shape[1], -1)
        if noised is not None:
            x = torch.cat([self.labels(noised.labels), x], 1)
            boxes = torch.cat([noised.boxes, boxes], 1)
        return x, boxes

    def places(self, index: int, x: Tensor, boxes: Tensor | None, valid: Tensor) -> dict[str, Tensor]:
        """What a decoder layer is told of where its queries are."""
        assert boxes is not None
        cx, cy, w, h = boxes.unbind(-1)
        parts = [sine(part, self.dim // 2, temperature=self.TEMPERATURE) for part in (cy, cx, h, w)]
        places = {"pos": self.to_pos(torch.cat(parts, -1).to(x.dtype))}
        if self.modulation:
            places["context_bias"] = self.modulation[index](x, boxes, valid)
        return places


class ConditionalBias(nn.Module):
    """What a place is worth to a query by its sines alone ("Conditional DETR", section 3.3; widths: "DAB-DETR", 4.4).

    The paper's keys and queries hold content and place side by side, so that their product is a sum: this is its second
    half, added to the attention scores.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.sides = nn.Linear(dim, 2)
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
        dim = x.shape[-1]
        cx, cy, w, h = boxes.unbind(-1)
        rh, rw = self.sides(x).sigmoid().unbind(-1)
        y = sine(cy, dim // 2, temperature=20.0) * (rh / h)[..., None]
        xs = sine(cx, dim // 2, temperature=20.0) * (rw / w)[..., None]
        q = self.q_proj(torch.cat([y, xs], -1).to(x.dtype) * self.scale(x))
        k = self.k_proj(sine_2d(valid, dim, temperature=20.0).to(x.dtype))
        q, k = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k))
        return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5


class GaussianBias(nn.Module):
    """A Gaussian around a point of the query's box for each head, as the logarithm that attention scores are added to."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_shape = nn.Linear(dim, heads * 4)
        nn.init.zeros_(self.to_shape.weight)
        angle = torch.arange(heads) * (2 * math.pi / heads)
        offset = torch.stack([angle.cos(), angle.sin()], -1) * 0.35
        with torch.no_grad():
            self.to_shape.bias.copy_(torch.cat([offset, torch.zeros(heads, 2)], -1).flatten())

    def forward(self, x: Tensor, boxes: Tensor, valid: Tensor) -> Tensor:
        """The bias [B, heads, Q, N] of cross-attention, from tokens [B, Q, D] and boxes [B, Q, 4]."""
        offset, spread = self.to_shape(x).float().unflatten(-1, (self.heads, 4)).split(2, -1)  # [B, Q, heads, 2]
        sides = boxes[:, :, None, 2:]
        centre = boxes[:, :, None, :2] + offset * sides
        sharp = (spread.exp() / (sides * 0.5).clamp(min=0.02)).square() / 2
        # -sharp (place - centre)², multiplied out: a product of matrices instead of passes over [B, heads, Q, N].
        place = grid(valid)
        q = torch.cat([-sharp, 2 * sharp * centre, (-sharp * centre.square()).sum(-1, keepdim=True)], -1)
        k = torch.cat([place.square(), place, torch.ones_like(place[..., :1])], -1)
        with torch.autocast(x.device.type, enabled=False):
            return (q.transpose(1, 2) @ k.transpose(1, 2)[:, None]).to(x.dtype)


def grid(valid: Tensor) -> Tensor:
    total = [(valid.cumsum(axis) - 0.5) / valid.sum(axis, keepdim=True).clamp(min=1) for axis in (2, 1)]
    return torch.stack(total, -1).flatten(1, 2)  # [B, N, 2]
