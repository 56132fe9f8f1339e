"""What a detection decoder starts from, and the heads that read it.

B batch, N tokens of the image, Q queries, K noised boxes, D embed_dim, H heads, C outputs of the class head. Boxes are
(centre x, centre y, width, height) as shares of the image's own width and height.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.blocks.position import sine

PRIOR = 0.01
"""Score of every class before training, where classes are scored by sigmoids ("Focal Loss", Lin et al. 2017)."""
SIDE = 0.2
"""Sides of a box before training, as a share of the image's."""
TEMPERATURE = 20.0
"""Of the sines of a box ("DAB-DETR", Liu et al. 2022, section 4.4)."""
OUTSIDE = 2.0
"""Where padding lies: at no place of the image."""


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


class Proposals(NamedTuple):
    """What the encoder's tokens find."""

    logits: Tensor
    """[B, N, C]."""
    boxes: Tensor
    """[B, N, 4]."""
    places: Tensor
    """[B, N, 2]: where the tokens lie, see `token_places`."""


def token_places(real: Tensor) -> Tensor:
    """Centres (x, y) of the cells of a map, bool [B, h, w], as shares of its real part, [B, h·w, 2]; padding is out."""
    counts = (real.cumsum(axis, dtype=torch.float32) for axis in (2, 1))  # whatever the default type is
    centres = [(n - 0.5) / real.sum(axis, keepdim=True).clamp(min=1) for n, axis in zip(counts, (2, 1), strict=True)]
    return torch.stack(centres, -1).masked_fill(~real[..., None], OUTSIDE).flatten(1, 2)


class ClassHead(nn.Linear):
    """Tokens [..., D] to logits [..., C]; where classes are scored by sigmoids, all begin at a low score."""

    def __init__(self, dim: int, num_outputs: int, *, sigmoid: bool) -> None:
        super().__init__(dim, num_outputs)
        if sigmoid:
            nn.init.constant_(self.bias, -math.log((1 - PRIOR) / PRIOR))


class BoxHead(nn.Module):
    """Three Linears to a box, or to the change of a box, which is none before training."""

    def __init__(self, dim: int, *, refines: bool) -> None:
        super().__init__()
        last = nn.Linear(dim, 4)
        self.layers = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim), last])
        if refines:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, boxes: Tensor | None = None) -> Tensor:
        """Tokens [B, Q, D], and the boxes [B, Q, 4] to start from, to boxes [B, Q, 4]."""
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        x = self.layers[-1](x).float()
        return (x if boxes is None else x + boxes.logit(eps=1e-5)).sigmoid()


class LearnedQueries(nn.Module):
    """A learned vector a query, added to queries and keys in every layer ("DETR", Carion et al. 2020, section 3.2)."""

    def __init__(self, num_queries: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_queries, dim)

    def start(self, memory: Tensor, places: Tensor, noised: Noised | None) -> tuple[Tensor, None, None]:
        """The first layer's tokens [B, Q, D], all zero."""
        return memory.new_zeros(memory.shape[0], *self.embed.weight.shape), None, None

    def guide(self, index: int, x: Tensor, boxes: Tensor | None, places: Tensor) -> dict[str, Tensor]:
        """What a decoder layer is told of where its queries are."""
        return {"pos": self.embed.weight[None]}


class BoxQueries(nn.Module):
    """A box a query, which every layer refines and from which its position follows ("DAB-DETR", sections 4.1 to 4.4).

    Args:
        num_queries: number of queries.
        dim: width of the tokens.
        num_heads: of the decoder's attention.
        depth: decoder layers whose cross-attention is led to the box; 0 = none.
        num_classes: classes of noised boxes; 0 = no denoising.
        num_outputs: width of the class head by which the encoder's tokens propose the boxes; None = boxes are learned.
        sigmoid: how that head scores.
    """

    def __init__(
        self,
        num_queries: int,
        dim: int,
        *,
        num_heads: int,
        depth: int,
        num_classes: int,
        num_outputs: int | None,
        sigmoid: bool,
    ) -> None:
        super().__init__()
        self.num_queries = num_queries
        # Where boxes are proposed they come by rank, so that of two at one place the second can give way.
        self.embed = nn.Embedding(num_queries, dim)
        self.labels = nn.Embedding(num_classes, dim) if num_classes else None
        self.to_pos = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.modulation = nn.ModuleList(GaussianModulation(dim, num_heads) for _ in range(depth))
        self.boxes: nn.Parameter | None = None
        self.proposer: Proposer | None = None
        if num_outputs is not None:
            self.proposer = Proposer(dim, num_outputs, sigmoid=sigmoid)
        else:
            sides = torch.full((num_queries, 2), SIDE)
            self.boxes = nn.Parameter(torch.cat([torch.rand(num_queries, 2), sides], 1).logit(eps=1e-2))

    def start(self, memory: Tensor, places: Tensor, noised: Noised | None) -> tuple[Tensor, Tensor, Proposals | None]:
        """The first layer's tokens [B, Q, D] and boxes [B, Q, 4], noised ones first, and what the tokens propose."""
        batch = memory.shape[0]  # not len, which an export takes for a constant
        proposals = None
        if self.proposer is not None:
            proposals = self.proposer(memory, places)
            boxes = self.proposer.best(proposals, self.num_queries)
        else:
            assert self.boxes is not None
            boxes = self.boxes.sigmoid().expand(batch, -1, -1)
        x = self.embed.weight.expand(batch, -1, -1)
        if noised is not None:
            assert self.labels is not None
            x = torch.cat([self.labels(noised.labels), x], 1)
            boxes = torch.cat([noised.boxes, boxes], 1)
        return x.to(memory.dtype), boxes, proposals

    def guide(self, index: int, x: Tensor, boxes: Tensor | None, places: Tensor) -> dict[str, Tensor]:
        """What a decoder layer is told of where its queries are."""
        assert boxes is not None
        sines = sine(boxes[..., [1, 0, 3, 2]], x.shape[-1] // 2, temperature=TEMPERATURE).flatten(-2)
        guide = {"pos": self.to_pos(sines.to(x.dtype))}
        if self.modulation:
            guide["context_bias"] = self.modulation[index](x, boxes, places)
        return guide


class Proposer(nn.Module):
    """Scores and boxes from the encoder's tokens ("Deformable DETR", Zhu et al. 2021, section 4.2)."""

    def __init__(self, dim: int, num_outputs: int, *, sigmoid: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.class_head = ClassHead(dim, num_outputs, sigmoid=sigmoid)
        self.box_head = BoxHead(dim, refines=True)
        self.no_object = not sigmoid

    def forward(self, memory: Tensor, places: Tensor) -> Proposals:
        """What each token [B, N, D] finds around its place [B, N, 2]."""
        h = self.norm(memory)
        anchors = torch.cat([places, torch.full_like(places, SIDE)], -1)
        return Proposals(self.class_head(h), self.box_head(h, anchors), places)

    def best(self, proposals: Proposals, count: int) -> Tensor:
        """The boxes [B, count, 4] of the best scores; without gradients, as each layer starts from given boxes."""
        logits = proposals.logits[..., :-1] if self.no_object else proposals.logits
        outside = proposals.places[..., 0] == OUTSIDE
        score = logits.amax(-1).masked_fill(outside, float("-inf"))
        # A tiny image has fewer tokens: the other queries begin in its middle. A branch on that would not hold for all
        # sizes of an exported graph.
        best = F.pad(score, (0, count), value=float("-inf")).topk(count, dim=1).indices
        boxes = F.pad(proposals.boxes.detach(), (0, 0, 0, count), value=0.5)
        return boxes.gather(1, best[..., None].expand(-1, -1, 4))


class GaussianModulation(nn.Module):
    """A Gaussian for each head, in one part of a query's box ("Spatially Modulated Co-Attention", Gao et al. 2021).

    Its logarithm is added to the attention scores. Heads begin on a circle around the box's centre.
    """

    RADIUS = 0.35
    """Of that circle, as a share of the box's sides."""
    LEAST = 0.02
    """Least standard deviation, as a share of the image's side."""
    MOST = 2.0
    """Bound on an offset from the centre, in sides, and on the logarithm of a width: without one, training at a high
    rate narrows a Gaussian until its gradients overflow."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_shape = nn.Linear(dim, num_heads * 4)
        angle = torch.arange(num_heads) * (2 * math.pi / num_heads)
        offset = self.RADIUS * torch.stack([angle.cos(), angle.sin()], -1)
        nn.init.zeros_(self.to_shape.weight)
        with torch.no_grad():
            self.to_shape.bias.copy_(torch.cat([offset, torch.zeros(num_heads, 2)], -1).flatten())

    def forward(self, x: Tensor, boxes: Tensor, places: Tensor) -> Tensor:
        """The bias [B, H, Q, N] of tokens [B, Q, D] with boxes [B, Q, 4] towards places [B, N, 2]."""
        shape = self.MOST * torch.tanh(self.to_shape(x).float() / self.MOST)
        offset, spread = shape.unflatten(-1, (self.num_heads, 4)).split(2, -1)  # [B, Q, H, 2]
        sides = boxes[:, :, None, 2:]
        centre = boxes[:, :, None, :2] + offset * sides
        sharp = (spread.exp() / (sides / 2).clamp(min=self.LEAST)).square() / 2
        # -sharp (place - centre)², multiplied out: one product of matrices, not passes over [B, H, Q, N].
        q = torch.cat([-sharp, 2 * sharp * centre, -(sharp * centre.square()).sum(-1, keepdim=True)], -1)
        k = torch.cat([places.square(), places, torch.ones_like(places[..., :1])], -1)
        with torch.autocast(x.device.type, enabled=False):
            return (q.transpose(1, 2) @ k.transpose(1, 2)[:, None]).to(x.dtype)
