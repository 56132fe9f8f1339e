"""What the DETRs of facebookresearch/detr and of Hugging Face share: one architecture under two sets of names."""

from dataclasses import replace
from typing import Any

from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from multimodal.models.detr import DETRConfig
from multimodal.pretrained.keymap import Rule
from multimodal.pretrained.record import plain_stack, require, template

RESNETS = {
    ("basic", 2): "resnet18",
    ("basic", 6): "resnet34",
    ("bottleneck", 6): "resnet50",
    ("bottleneck", 23): "resnet101",
    ("bottleneck", 36): "resnet152",
}
"""The ResNets by their kind of block and the number of these in the third stage."""
IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
SHORTEST_EDGE, LONGEST_EDGE = 800, 1333
"""Pixels to which images are resized."""

# What the published code cannot be told, and so has to be as it is there.
_MODEL: dict[str, tuple[Any, ...]] = {
    "scores": ("softmax",),
    "queries": ("learned",),
    "modulated": (False,),
    "backbone_stage": (-1,),
    "encoder.final_norm": (False,),
    "decoder.final_norm": (True,),
}


def coco_names() -> list[str]:
    """The names of COCO's categories by their ids 0 … 90; `N/A` where an id is not used."""
    return ["N/A", *FasterRCNN_ResNet50_FPN_Weights.DEFAULT.meta["categories"][1:]]


def require_published(config: DETRConfig, where: str, **allowed: tuple[Any, ...]) -> None:
    """ValueError unless the model is a DETR as published; `allowed` are more fields, as for `require`."""
    stacks: dict[str, tuple[Any, ...]] = {}
    for side in ("encoder", "decoder"):
        own: dict[str, tuple[Any, ...]] = {"norm_order": ("post",), "norm_eps": (1e-5,), "layer_scale": (None,)}
        stacks |= plain_stack(getattr(config, side), f"{side}.", **own)
    require(config, _MODEL | stacks | allowed, where)


def require_resnet(config: DETRConfig, where: str) -> None:
    """ValueError unless the backbone is a plain ResNet, under any tag of timm's."""
    require(replace(config, backbone=config.backbone.split(".")[0]), {"backbone": tuple(RESNETS.values())}, where)


def backbone_rules(config: DETRConfig, theirs: str) -> list[Rule]:
    """A backbone under timm's own names, which begin with `theirs`."""
    ours = "backbone.net."
    names = [name.removeprefix(ours) for name in template("detr", config) if name.startswith(ours)]
    return [Rule(f"{theirs}{name}", f"{ours}{name}") for name in names]


def is_counter(key: str) -> bool:
    """Whether a key is the count of batches of a batch norm, which says nothing of one that is frozen."""
    return key.endswith(".num_batches_tracked")
