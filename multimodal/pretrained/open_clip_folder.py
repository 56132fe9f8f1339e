"""A folder that open_clip loads by itself: its config, and the weights under its names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multimodal.models.clip import CLIPConfig
from multimodal.pretrained.files import write_safetensors
from multimodal.pretrained.hf import write_json
from multimodal.pretrained.keymap import KeyMap
from multimodal.pretrained.open_clip import CONFIG, WEIGHTS, mlp_ratio, rules
from multimodal.pretrained.published_clip import require_published, square
from multimodal.pretrained.record import Checkpoint, build_config, template


def to_open_clip(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `open_clip.create_model("local-dir:FOLDER")` takes.

    Raises:
        ValueError: the model has something that open_clip's does not have.
    """
    where = "export to open_clip"
    config: CLIPConfig = build_config(checkpoint.task, checkpoint.config, where)
    vision, text = config.vision, config.text
    require_published(
        config,
        where,
        **{
            "vision.in_channels": (3,),
            "vision.activation": ("gelu", "gelu_tanh", "quick_gelu"),
            "text.activation": ("gelu", "gelu_tanh", "quick_gelu"),
            "text.norm_eps": (vision.norm_eps,),
        },
    )
    if (vision.activation == "quick_gelu") != (text.activation == "quick_gelu"):
        found = f"vision.activation {vision.activation!r} beside text.activation {text.activation!r}"
        raise ValueError(f"{where}: that format cannot express {found}")
    preprocess = None if checkpoint.preprocess is None else _write_preprocess(checkpoint.preprocess, where)
    state = KeyMap(rules(config), template("clip", config)).to_theirs(checkpoint.state_dict, where)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS, state, {})
    described = {"model_cfg": _model_cfg(config), "preprocess_cfg": preprocess or {}}
    write_json(folder / CONFIG, described)


def _model_cfg(config: CLIPConfig) -> dict[str, Any]:
    vision, text = config.vision, config.text
    cfg: dict[str, Any] = {
        "embed_dim": config.embed_dim,
        "vision_cfg": {
            "image_size": square(vision.image_hw),
            "patch_size": square(vision.patch_hw),
            "head_width": vision.embed_dim // vision.num_heads,
            "no_ln_pre": not vision.pre_norm,
            "pool_type": "tok" if vision.pool == "cls" else "avg",
            "final_ln_after_pool": vision.pool_norm,
            "patch_dropout": vision.patch_dropout,
            **_tower_cfg(vision),
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "heads": text.num_heads,
            **_tower_cfg(text),
        },
        "quick_gelu": vision.activation == "quick_gelu",
    }
    if text.end_token != text.vocab_size - 1:
        cfg["text_cfg"] |= {"pool_type": "eos", "eos_id": text.end_token}
    if config.logit_bias is not None:
        cfg["init_logit_bias"] = config.logit_bias
    return cfg


def _tower_cfg(stack: Any) -> dict[str, Any]:
    cfg = {
        "width": stack.embed_dim,
        "layers": stack.depth,
        "mlp_ratio": mlp_ratio(round(stack.embed_dim * stack.mlp_ratio), stack.embed_dim),
        "ls_init_value": stack.layer_scale,
    }
    if stack.norm_eps != 1e-5:
        cfg["norm_kwargs"] = {"eps": stack.norm_eps}
    if stack.activation == "gelu_tanh":
        cfg["act_kwargs"] = {"approximate": "tanh"}
    return cfg


def _write_preprocess(preprocess: Mapping[str, Any], where: str) -> dict[str, Any]:
    crop_pct, interpolation = preprocess["crop_pct"], preprocess["interpolation"]
    if crop_pct != 1 or interpolation not in ("bicubic", "bilinear"):
        raise ValueError(f"{where}: that format cannot express crop_pct {crop_pct} with interpolation {interpolation}")
    return {
        "mean": list(preprocess["mean"]),
        "std": list(preprocess["std"]),
        "interpolation": interpolation,
        "resize_mode": "squash" if preprocess["crop_mode"] == "squash" else "shortest",
    }
