"""A folder that timm loads by itself: which of timm's architectures, with which arguments, is a model of ours.

`config.json` names a function of timm's and JSON arguments for it. What no such argument can say (the epsilon of the
norms, a gated MLP, a distillation token) comes with the function. The first pair whose module, built without memory,
reads as our config and has our shapes is the one.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.models.vit import ViTConfig
from multimodal.pretrained.files import write_safetensors, write_whole
from multimodal.pretrained.keymap import check_keys
from multimodal.pretrained.record import Checkpoint, build_config
from multimodal.pretrained.timm_vit import build_on_meta, config_of, require_timm, to_timm

_RMS = {"norm_layer": "rmsnorm"}
# The function, arguments beside those of `_arguments`, and whether a gated MLP is packed (see `timm_vit.rules`).
_ARCHITECTURES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("vit_base_patch16_224", {}, True),
    ("vit_base_patch16_clip_224", {}, True),  # norms with epsilon 1e-5
    ("vit_base_patch16_224", _RMS, True),
    ("vit_giant_patch14_dinov2", {}, True),  # gated
    ("vit_giant_patch14_dinov2", _RMS, True),
    ("aimv2_large_patch14_224", {}, False),  # gated, RMSNorm with epsilon 1e-5, patches normed
    ("deit_base_distilled_patch16_224", {}, True),
)
_NOT_COMPARED = {
    *ViTConfig.TRAINING_ONLY,
    *("init", "layer_scale"),  # how weights begin
    # made sure of by `require_timm`
    *("attention", "attention_options", "num_kv_heads", "key_bias", "rope", "rope_base"),
    "mlp_ratio",  # compared as shapes of weights
}


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` takes.

    Raises:
        ValueError: the model has something that timm's does not have.
    """
    where = "export to timm"
    config: ViTConfig = build_config(checkpoint.task, checkpoint.config, where)
    require_timm(config, where)
    architecture, arguments, packed, module = _architecture(config, where)
    state = to_timm(checkpoint, packed=packed)
    check_keys(state, module.state_dict(), where)
    described = {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": config.embed_dim,
        "model_args": arguments,
        **({"label_names": checkpoint.labels} if checkpoint.labels else {}),
        "pretrained_cfg": _pretrained_cfg(checkpoint, config),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    write_whole(folder / "config.json", json.dumps(described, indent=2).encode())


def _architecture(config: ViTConfig, where: str) -> tuple[str, dict[str, Any], bool, nn.Module]:
    """timm's function, its arguments, whether its MLP is packed, and the module that they make.

    ValueError that names the fields in which the nearest differs.
    """
    nearest: list[str] | None = None
    for architecture, extra, packed in _ARCHITECTURES:
        arguments = _arguments(config, packed) | extra
        module = build_on_meta(architecture, where, **arguments)
        differing = list(_differing(config, config_of(module, where)))
        if not differing:
            return architecture, arguments, packed, module
        if nearest is None or len(differing) < len(nearest):
            nearest = differing
    raise ValueError(f"{where}: that format cannot express {', '.join(nearest or [])}")


def _arguments(config: ViTConfig, packed: bool) -> dict[str, Any]:
    (height, width), (p, q) = config.image_hw, config.patch_hw
    hidden = round(config.embed_dim * config.mlp_ratio) * (2 if config.gated and packed else 1)
    ratio = hidden / config.embed_dim
    if int(config.embed_dim * ratio) != hidden:  # timm rounds down, also what is a whole number but for its last bit
        ratio = (hidden + 0.5) / config.embed_dim
    return {
        "img_size": height if height == width else [height, width],
        "patch_size": p if p == q else [p, q],
        "in_chans": config.in_channels,
        "num_classes": config.num_classes,
        "global_pool": "token" if config.pool == "cls" else "avg",
        "embed_dim": config.embed_dim,
        "depth": config.depth,
        "num_heads": config.num_heads,
        "mlp_ratio": ratio,
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "proj_bias": config.out_bias,
        "init_values": config.layer_scale,
        "class_token": config.class_token,
        "pos_embed": "learn" if config.position == "learned" else "none",
        "no_embed_class": not config.prefix_position,
        "reg_tokens": config.num_registers,
        "pre_norm": config.pre_norm,
        "final_norm": config.final_norm,
        "fc_norm": config.pool_norm,
        "act_layer": config.activation,
    }


def _differing(ours: ViTConfig, theirs: ViTConfig) -> Iterator[str]:
    """Fields of our config, with their values, that timm's module has otherwise."""
    found, wanted = _plain(theirs), _plain(ours)
    for name, value in wanted.items():
        meaningless = name == "prefix_position" and not ours.num_prefix
        if name not in _NOT_COMPARED and not meaningless and found[name] != value:
            yield f"{name} {value!r}"


def _plain(config: ViTConfig) -> dict[str, Any]:
    """The fields, where one thing can be said in two ways always in the same."""
    head_dim = config.head_dim or config.embed_dim // config.num_heads
    return asdict(config) | {"image_size": config.image_hw, "patch_size": config.patch_hw, "head_dim": head_dim}


def _pretrained_cfg(checkpoint: Checkpoint, config: ViTConfig) -> dict[str, Any]:
    preprocess = checkpoint.preprocess or {}
    names = ("interpolation", "crop_pct", "crop_mode", "mean", "std")
    return {
        "input_size": [config.in_channels, *config.image_hw],
        "fixed_input_size": True,
        **{name: preprocess[name] for name in names if name in preprocess},
        "num_classes": config.num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": ["head", "head_dist"] if config.distilled else "head",
    }
