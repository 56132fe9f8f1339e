"""A DETR's outputs as detections in pixels.

B batch, Q queries, C outputs of the class head, K detections of an image
"""

from typing import Literal

import torch
from torch import Tensor
from torchvision.ops import box_convert

from multimodal.models.detr import DETROutput

Detections = dict[str, Tensor]
"""Of one image: `scores` float32 [K] in 0 … 1, `labels` int64 [K], `boxes` float32 [K, 4], xyxy in pixels."""

MOST = 100
"""Detections of an image, as many as COCO's evaluation looks at; where classes are scored by themselves."""


@torch.no_grad()
def detections(
    output: DETROutput, sizes: Tensor, *, scores: Literal["softmax", "sigmoid"] = "softmax"
) -> list[Detections]:
    """The detections of each image.

    Args:
        output: logits [B, Q, C] and boxes [B, Q, 4].
        sizes: int64 [B, 2], height and width in pixels of the images to which the boxes shall belong.
        scores: softmax gives each query its best class, as published; sigmoid takes the best pairs of query and class.
    """
    logits = output.logits.float()
    if scores == "softmax":
        best, labels = logits.softmax(-1)[..., :-1].max(-1)
        boxes = output.boxes
    else:
        classes = logits.shape[-1]
        best, index = logits.sigmoid().flatten(1).topk(min(MOST, logits[0].numel()), dim=1)
        labels = index % classes
        boxes = output.boxes.gather(1, (index // classes)[..., None].expand(-1, -1, 4))
    height, width = sizes.to(boxes.device).unbind(1)
    scale = torch.stack([width, height, width, height], 1)[:, None]
    corners = box_convert(boxes.float(), "cxcywh", "xyxy") * scale
    return [{"scores": best[i], "labels": labels[i], "boxes": corners[i]} for i in range(len(corners))]
