"""facebookresearch/detr: `.pth` files of detection models, under the names of its code.

Such a file holds weights alone. What they do not show is as published: 8 heads, ReLU, norms after each part; and a last
stage that is dilated (DC5) only where the file's name says so.
"""

import re
import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimodal.models.detr import LAYERS, DETRConfig
from multimodal.pretrained.files import write_whole
from multimodal.pretrained.keymap import KeyMap, Rule, Split
from multimodal.pretrained.published_detr import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LONGEST_EDGE,
    RESNETS,
    SHORTEST_EDGE,
    backbone_rules,
    coco_names,
    is_counter,
    require_published,
    require_resnet,
)
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

DILATED = "dc5"
"""What the name of a file has in it whose backbone is dilated."""
HEADS = 8
# What is looked at, and what tells this model from its successors, which share many names; with their dimensions.
_REQUIRED = {
    "query_embed.weight": 2,
    "class_embed.bias": 1,
    "transformer.encoder.layers.0.self_attn.in_proj_weight": 2,
    "transformer.decoder.layers.0.multihead_attn.in_proj_weight": 2,
    "transformer.encoder.layers.0.linear1.bias": 1,
    "transformer.decoder.layers.0.linear1.bias": 1,
}
_PUBLISHED = re.compile(r"detr-r(50|101)\b")


def rules(config: DETRConfig) -> list[Rule]:
    """The names of facebookresearch/detr and ours."""
    table = [
        *backbone_rules(config, "backbone.0.body."),
        Rule("input_proj.*", "input_proj.*"),
        Rule("query_embed.weight", "queries.embed.weight"),
        Rule("transformer.decoder.norm.*", "decoder.norm.*"),
        Rule("class_embed.*", "class_head.*"),
        Rule("bbox_embed.layers.*.*", "box_head.layers.*.*"),
    ]
    cross = {"multihead_attn": "cross_attn"}
    norms = ("self_attn", "cross_attn", "mlp")
    for side, attentions, parts in (
        ("encoder", {"self_attn": "self_attn"}, (norms[0], norms[2])),
        ("decoder", {"self_attn": "self_attn"} | cross, norms),
    ):
        theirs, ours = f"transformer.{side}.layers.*", f"{side}.blocks.*"
        for a, b in attentions.items():
            for kind in ("weight", "bias"):
                fused = tuple(f"{ours}.{b}.{x}_proj.{kind}" for x in "qkv")
                table.append(Rule(f"{theirs}.{a}.in_proj_{kind}", fused, (Split(3),)))
            table.append(Rule(f"{theirs}.{a}.out_proj.*", f"{ours}.{b}.out_proj.*"))
        table += [Rule(f"{theirs}.norm{i}.*", f"{ours}.{part}_residual.norm.*") for i, part in enumerate(parts, 1)]
        table += [Rule(f"{theirs}.linear{i}.*", f"{ours}.mlp.fc{i}.*") for i in (1, 2)]
    return table


# ---------------------------------------------------------------------------------------------------------- reading


def read_file(path: Path, state: Mapping[str, Tensor]) -> Checkpoint:
    """The weights of a `.pth` file; those of COCO, known by their 91 classes, come with its names and ids.

    Raises:
        ValueError: the file holds another kind of DETR.
    """
    state = {key: value for key, value in state.items() if not is_counter(key)}
    config = _config(state, path)
    weights = KeyMap(rules(config), template("detr", config)).to_ours(state, str(path))
    labels = coco_names() if config.num_classes == len(coco_names()) else None
    preprocess = {
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "interpolation": "bilinear",
        "shortest_edge": SHORTEST_EDGE,
        "longest_edge": LONGEST_EDGE,
        "category_ids": list(range(len(labels))) if labels else None,
    }
    return Checkpoint("detr", plain_config(config), preprocess, labels, None, weights)


def _config(state: Mapping[str, Tensor], path: Path) -> DETRConfig:
    """The config by the shapes of the weights."""
    if any(key.startswith(("detr.", "mask_head.", "bbox_attention.")) for key in state):
        raise ValueError(f"{path}: holds a panoptic DETR, which draws masks; expected one that only detects")
    if "transformer.encoder.norm.weight" in state:
        raise ValueError(f"{path}: holds a DETR with norms before each part, expected one as published")
    for key, dims in _REQUIRED.items():
        if key not in state or state[key].dim() != dims or not state[key].numel():
            found = f"with {key} of shape {list(state[key].shape)}" if key in state else f"without {key}"
            raise ValueError(f"{path}: holds a model {found}, expected a DETR of facebookresearch/detr")
    num_queries, dim = state["query_embed.weight"].shape
    config: DETRConfig = build_config(
        "detr",
        {
            "num_classes": len(state["class_embed.bias"]) - 1,
            "num_queries": num_queries,
            "backbone": _resnet(state, path),
            "dilation": _is_dilated(path),
            "encoder": {**_layers(state, "encoder", dim), "final_norm": False},
            "decoder": _layers(state, "decoder", dim),
        },
        str(path),
    )
    return config


def _resnet(state: Mapping[str, Tensor], path: Path) -> str:
    stage = "backbone.0.body.layer3"
    kind = "bottleneck" if f"{stage}.0.conv3.weight" in state else "basic"
    count = _count(state, stage)
    if (kind, count) not in RESNETS:
        raise ValueError(f"{path}: {stage} has {count} {kind} blocks, expected one of {', '.join(RESNETS.values())}")
    return RESNETS[kind, count]


def _layers(state: Mapping[str, Tensor], side: str, dim: int) -> dict[str, Any]:
    layers = f"transformer.{side}.layers"
    width = len(state[f"{layers}.0.linear1.bias"])
    return {**LAYERS, "embed_dim": dim, "depth": _count(state, layers), "num_heads": HEADS, "mlp_ratio": width / dim}


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered modules there are under a name."""
    return len({key.removeprefix(f"{prefix}.").split(".")[0] for key in state if key.startswith(f"{prefix}.")})


def _is_dilated(path: Path) -> bool:
    if DILATED in path.name.lower():
        return True
    if not _PUBLISHED.match(path.name):
        warnings.warn(
            f"{path}: the file does not say whether its backbone is dilated and how many heads it has; "
            f"it is taken as not dilated, since its name has no {DILATED!r} in it, and as of {HEADS} heads",
            stacklevel=4,
        )
    return False


# ---------------------------------------------------------------------------------------------------------- writing


def to_facebook(checkpoint: Checkpoint, path: Path) -> None:
    """Write a file whose `model` facebookresearch/detr loads; labels and preprocessing have no place in it.

    Raises:
        ValueError: the model has something that the original code does not have, or that the file could not tell.
    """
    where = "export to facebookresearch/detr"
    config: DETRConfig = build_config(checkpoint.task, checkpoint.config, where)
    require_resnet(config, where)
    require_published(
        config,
        where,
        **{
            "encoder.num_heads": (HEADS,),
            "decoder.num_heads": (HEADS,),
            "encoder.activation": ("relu",),
            "decoder.activation": ("relu",),
            "decoder.mlp_ratio": (config.encoder.mlp_ratio,),
        },
    )
    if config.dilation != (DILATED in path.name.lower()):
        raise ValueError(
            f"{where}: dilation is {config.dilation}, which the name of the file has to tell: "
            f"expected one with{'' if config.dilation else 'out'} {DILATED!r} in it, not {path.name}"
        )
    state = KeyMap(rules(config), template("detr", config)).to_theirs(checkpoint.state_dict, where)
    content = BytesIO()
    torch.save({"model": state}, content)
    write_whole(path, content.getbuffer())
