"""Published DETRs of the same size."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.models.detr import DETRConfig
from multimodal.pretrained.hf import write_activation
from multimodal.pretrained.published_detr import require_published
from tasks.peers import HF_ATTENTION, Attention, peer
from tasks.workload import Data, Peer, Setting, Subject, Workload, both_ways


def peers(work: Workload, setting: Setting) -> list[Peer]:
    """Hugging Face's, with the same backbone of timm's and the losses of every layer; the original is no package."""
    if "losses" in work.facts:
        forms = {"ForObjectDetectionLoss": partial(_losses, work)}
        return [Peer(name="Hugging Face", package="transformers", forms=forms)]

    def run(model: Any, data: Data) -> Any:
        return model(data["image"], labels=data["objects"]).loss if work.trains else model(data["image"])

    def make(kind: Attention) -> nn.Module:
        model = _hugging_face(work.config, kind)
        for part in work.facts.get("frozen", ()):
            model.model.backbone.model.get_submodule(part).requires_grad_(False)
        return model.to(memory_format=torch.channels_last)

    options: dict[str, Any] = {"told": "channels last", "prepare": _prepared}
    return [peer("Hugging Face", "transformers", work, setting, make, run, **options)]


def _losses(work: Workload, data: Data) -> Subject:
    """The losses that its model returns, of outputs that are there already."""
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    config, objects = _config(work.config, "fused"), _objects(data)
    logits, boxes = (data[name].clone().requires_grad_() for name in ("logits", "found"))

    def loss() -> Tensor:
        total: Tensor = ForObjectDetectionLoss(logits[-1], objects, logits.device, boxes[-1], config, logits, boxes)[0]
        return total

    return both_ways(loss, (logits, boxes))


def _objects(data: Data) -> list[dict[str, Tensor]]:
    """Those of each image."""
    pairs = zip(data["labels"], data["boxes"], strict=True)
    return [{"class_labels": labels[labels >= 0], "boxes": boxes[labels >= 0].float()} for labels, boxes in pairs]


def _prepared(data: Data) -> Data:
    """The images in the order of their convolutions, and the objects of each image."""
    image: Tensor = data["image"].contiguous(memory_format=torch.channels_last)
    return {"image": image, "objects": _objects(data)}


def _hugging_face(config: DETRConfig, kind: Attention) -> Any:
    import transformers

    hf: Any = transformers
    return hf.DetrForObjectDetection(_config(config, kind))


def _config(config: DETRConfig, kind: Attention) -> Any:
    import transformers

    where = "Hugging Face's DETR"
    if config.backbone == "conv":
        raise ValueError(f"{where} cannot express backbone 'conv'")
    require_published(config, where)
    # The norms are frozen by timm: Hugging Face's own way leaves out the activations that timm has within some.
    hf: Any = transformers
    backbone = hf.TimmBackboneConfig(backbone=config.backbone, out_indices=[-1], freeze_batch_norm_2d=True)
    layers = {
        f"{side}_{name}": value
        for side, stack in (("encoder", config.encoder), ("decoder", config.decoder))
        for name, value in (
            ("layers", stack.depth),
            ("attention_heads", stack.num_heads),
            ("ffn_dim", round(stack.embed_dim * stack.mlp_ratio)),
        )
    }
    return hf.DetrConfig(
        backbone_config=backbone,
        num_labels=config.num_classes,
        num_queries=config.num_queries,
        d_model=config.decoder.embed_dim,
        dropout=config.decoder.dropout,
        activation_dropout=config.decoder.mlp_dropout,
        attention_dropout=config.decoder.attention_dropout,
        activation_function=write_activation(config.decoder.activation),
        auxiliary_loss=True,
        attn_implementation=HF_ATTENTION[kind],
        **layers,
    )
