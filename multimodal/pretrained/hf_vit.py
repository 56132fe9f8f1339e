"""Hugging Face's ViT: folders of `ViTForImageClassification` and `ViTModel`, under the key names that are published.

Those differ from the names in memory since transformers 5, and transformers translates at its own door: a module in
memory is therefore saved and read back. Reading and writing folders needs no transformers.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.models.vit import ViTConfig
from multimodal.pretrained.files import one_line, read_folder_weights, read_json, write_safetensors
from multimodal.pretrained.hf import (
    named,
    read_activation,
    read_crop,
    read_labels,
    read_pixels,
    read_saved,
    write_activation,
    write_crop,
    write_json,
    write_labels,
    write_pixels,
)
from multimodal.pretrained.keymap import KeyMap, Reshape, Rule
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, plain_stack, require, template

# ------------------------------------------------------------------------------------------------------- the tables


def rules(config: ViTConfig, prefix: str) -> list[Rule]:
    """HF's published names and ours; `prefix` is `vit.` beside a classifier, empty for a bare `ViTModel`."""
    dim = config.embed_dim
    theirs, ours = f"{prefix}encoder.layer.*", "encoder.blocks.*"
    tokens = (Reshape((1, -1, dim), (-1, dim)),)
    patch = Reshape((dim, config.in_channels, *config.patch_hw), (dim, -1))
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    return [
        Rule(f"{prefix}embeddings.cls_token", "prefix", tokens),
        Rule(f"{prefix}embeddings.position_embeddings", "position", tokens),
        Rule(f"{prefix}embeddings.patch_embeddings.projection.weight", "patch_embed.proj.weight", (patch,)),
        Rule(f"{prefix}embeddings.patch_embeddings.projection.bias", "patch_embed.proj.bias"),
        Rule(f"{theirs}.layernorm_before.*", f"{ours}.self_attn_residual.norm.*"),
        *(Rule(f"{theirs}.attention.attention.{a}.*", f"{ours}.self_attn.{b}.*") for a, b in attention.items()),
        Rule(f"{theirs}.attention.output.dense.*", f"{ours}.self_attn.out_proj.*"),
        Rule(f"{theirs}.layernorm_after.*", f"{ours}.mlp_residual.norm.*"),
        Rule(f"{theirs}.intermediate.dense.*", f"{ours}.mlp.fc1.*"),
        Rule(f"{theirs}.output.dense.*", f"{ours}.mlp.fc2.*"),
        Rule(f"{prefix}layernorm.*", "encoder.norm.*"),
        Rule("classifier.*", "head.*"),
    ]


# HF's field, ours, and the value that a config.json without the field means.
_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("hidden_size", "embed_dim", 768),
    ("num_hidden_layers", "depth", 12),
    ("num_attention_heads", "num_heads", 12),
    ("hidden_dropout_prob", "dropout", 0.0),
    ("attention_probs_dropout_prob", "attention_dropout", 0.0),
    ("layer_norm_eps", "norm_eps", 1e-12),
    ("image_size", "image_size", 224),
    ("patch_size", "patch_size", 16),
    ("num_channels", "in_channels", 3),
    ("qkv_bias", "qkv_bias", True),
)
# What HF's ViT cannot be told, and so has to be as it is there.
_FIXED: dict[str, tuple[Any, ...]] = {
    "norm_order": ("pre",),
    "final_norm": (True,),
    "qkv_bias": (True, False),
    "layer_scale": (None,),
    "pool": ("cls",),
    "class_token": (True,),
    "num_registers": (0,),
    "distilled": (False,),
    "position": ("learned",),
    "prefix_position": (True,),
    "patch_bias": (True,),
    "conv_stem": (False,),
    "patch_norm": (False,),
    "pre_norm": (False,),
    "pool_norm": (False,),
}

# ---------------------------------------------------------------------------------------------------------- reading


def read_folder(folder: Path) -> Checkpoint:
    """A folder that `save_pretrained` wrote, or a download from the hub.

    The tanh pooler of a `ViTModel` is no part of this suite's model, which returns the normed class token: it is left
    out with a warning.
    """
    return _read(folder, str(folder))


def read_module(module: nn.Module) -> Checkpoint:
    """A transformers module in memory."""
    return read_saved(module, _read)


def _read(folder: Path, where: str) -> Checkpoint:
    try:
        config, labels, preprocess = _description(folder, where)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: its JSON files do not describe a ViT ({one_line(repr(error))})") from error
    state = read_folder_weights(folder)
    pooler = sorted(key for key in state if key.startswith(("pooler.", "vit.pooler.")))
    if pooler:
        warnings.warn(f"{where}: left out {', '.join(pooler)}: features are the normed class token", stacklevel=3)
    state = {key: value for key, value in state.items() if key not in pooler}
    prefix = "vit." if any(key.startswith("vit.") for key in state) else ""
    weights = KeyMap(rules(config, prefix), template("vit", config)).to_ours(state, where)
    return Checkpoint("vit", plain_config(config), preprocess, labels, None, weights)


def _description(folder: Path, where: str) -> tuple[ViTConfig, list[str] | None, dict[str, Any] | None]:
    """Config, labels and preprocessing from the folder's JSON files."""
    hf = read_json(folder / "config.json")
    architecture = (hf.get("architectures") or [None])[0]
    if architecture not in ("ViTForImageClassification", "ViTModel"):
        raise ValueError(f"{where}: architecture {architecture!r}, expected ViTForImageClassification or ViTModel")
    labels = read_labels(hf) if architecture == "ViTForImageClassification" else []
    config = _config(hf, len(labels), where)
    return config, named(labels), _preprocess(folder, config)


def _config(hf: Mapping[str, Any], num_classes: int, where: str) -> ViTConfig:
    values = {ours: hf.get(theirs, default) for theirs, ours, default in _FIELDS}
    config: ViTConfig = build_config(
        "vit",
        {
            **values,
            "mlp_ratio": hf.get("intermediate_size", 3072) / values["embed_dim"],
            "activation": read_activation(hf.get("hidden_act", "gelu"), "hidden_act", where),
            "num_classes": num_classes,
        },
        where,
    )
    return config


def _preprocess(folder: Path, config: ViTConfig) -> dict[str, Any] | None:
    """preprocessor_config.json in this suite's words; None without the file."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    hf = read_json(path)
    half = [0.5] * config.in_channels
    return {"size": list(config.image_hw), **read_pixels(hf, path, half, half), **read_crop(hf)}


# ---------------------------------------------------------------------------------------------------------- writing


def to_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `ViTForImageClassification.from_pretrained` takes, or `ViTModel` for a model without head.

    Raises:
        ValueError: the model has something that HF's does not have.
    """
    where = "export to HF ViT"
    config: ViTConfig = build_config(checkpoint.task, checkpoint.config, where)
    require(config, plain_stack(config, "", **_FIXED), where)
    prefix = "vit." if config.num_classes else ""
    names = KeyMap(rules(config, prefix), template(checkpoint.task, config))
    state = names.to_theirs(checkpoint.state_dict, where)
    hf = {theirs: getattr(config, ours) for theirs, ours, _ in _FIELDS}
    hf |= {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification" if config.num_classes else "ViTModel"],
        "intermediate_size": round(config.embed_dim * config.mlp_ratio),
        "hidden_act": write_activation(config.activation),
    }
    if config.num_classes:
        hf |= write_labels(checkpoint.labels, config.num_classes)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    write_json(folder / "config.json", hf)
    if checkpoint.preprocess is not None:
        write_json(folder / "preprocessor_config.json", _preprocessor(checkpoint.preprocess))


def _preprocessor(preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """A preprocess record in HF's words. ViT's own processor only squashes; CLIP's is the one that crops as well."""
    plain = preprocess["crop_mode"] == "squash" and preprocess["crop_pct"] == 1
    return {
        "image_processor_type": "ViTImageProcessor" if plain else "CLIPImageProcessor",
        **write_crop(preprocess, "export to HF ViT"),
        "do_convert_rgb": len(preprocess["mean"]) == 3,
        **write_pixels(preprocess),
    }
