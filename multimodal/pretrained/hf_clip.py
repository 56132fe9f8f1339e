"""Hugging Face's CLIP: folders of `CLIPModel`, under the key names that are published.

Those may differ from the names in memory, and transformers translates at its own door: a module in memory is therefore
saved and read back. Reading and writing folders needs no transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.models.clip import CLIPConfig
from multimodal.pretrained.files import one_line, read_folder_weights, read_json, write_safetensors
from multimodal.pretrained.hf import (
    read_activation,
    read_crop,
    read_pixels,
    read_saved,
    write_activation,
    write_crop,
    write_json,
    write_pixels,
)
from multimodal.pretrained.keymap import KeyMap, Reshape, Rule
from multimodal.pretrained.published_clip import OPENAI_MEAN, OPENAI_STD, require_published, tokenizer_of
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

ARCHITECTURE = "CLIPModel"
_LEGACY_END = 2
"""An `eos_token_id` of old configs, by which transformers takes the largest token of a text."""

# ------------------------------------------------------------------------------------------------------- the tables


def rules(config: CLIPConfig) -> list[Rule]:
    """HF's published names and ours."""
    vision = config.vision
    patch = Reshape((vision.embed_dim, vision.in_channels, *vision.patch_hw), (vision.embed_dim, -1))
    seen, read = "vision_model.embeddings", "text_model.embeddings"
    return [
        Rule(f"{seen}.class_embedding", "vision.prefix", (Reshape((-1,), (1, -1)),)),
        Rule(f"{seen}.patch_embedding.weight", "vision.patch_embed.proj.weight", (patch,)),
        Rule(f"{seen}.position_embedding.weight", "vision.position"),
        Rule("vision_model.pre_layrnorm.*", "vision.pre_norm.*"),
        *_block_rules("vision"),
        Rule("vision_model.post_layernorm.*", "vision.pool_norm.*" if vision.pool_norm else "vision.encoder.norm.*"),
        Rule("visual_projection.weight", "vision_proj.weight"),
        Rule(f"{read}.token_embedding.weight", "text.token_embed.weight"),
        Rule(f"{read}.position_embedding.weight", "text.position.weight"),
        *_block_rules("text"),
        Rule("text_model.final_layer_norm.*", "text.encoder.norm.*"),
        Rule("text_projection.weight", "text_proj.weight"),
        Rule("logit_scale", "logit_scale", (Reshape((), (1,)),)),
    ]


def _block_rules(tower: str) -> list[Rule]:
    theirs, ours = f"{tower}_model.encoder.layers.*", f"{tower}.encoder.blocks.*"
    return [
        Rule(f"{theirs}.layer_norm1.*", f"{ours}.self_attn_residual.norm.*"),
        Rule(f"{theirs}.self_attn.*.*", f"{ours}.self_attn.*.*"),
        Rule(f"{theirs}.layer_norm2.*", f"{ours}.mlp_residual.norm.*"),
        Rule(f"{theirs}.mlp.*.*", f"{ours}.mlp.*.*"),
    ]


# HF's field, ours of each tower, and the values that a config.json without the field means, of vision and of text.
_FIELDS: tuple[tuple[str, str, Any, Any], ...] = (
    ("hidden_size", "embed_dim", 768, 512),
    ("num_hidden_layers", "depth", 12, 12),
    ("num_attention_heads", "num_heads", 12, 8),
    ("layer_norm_eps", "norm_eps", 1e-5, 1e-5),
    ("attention_dropout", "attention_dropout", 0.0, 0.0),
)
_VISION_FIELDS = (("image_size", 224), ("patch_size", 32), ("in_channels", 3))
_RENAMED = {"in_channels": "num_channels"}

# ---------------------------------------------------------------------------------------------------------- reading


def read_folder(folder: Path) -> Checkpoint:
    """A folder that `save_pretrained` wrote, or a download from the hub."""
    return _read(folder, str(folder))


def read_module(module: nn.Module) -> Checkpoint:
    """A transformers module in memory."""
    return read_saved(module, _read)


def _read(folder: Path, where: str) -> Checkpoint:
    try:
        config = _config(read_json(folder / "config.json"), where)
        preprocess = _preprocess(folder, config)
    except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: its JSON files do not describe a CLIP ({one_line(repr(error))})") from error
    state = {k: v for k, v in read_folder_weights(folder).items() if not k.endswith(".position_ids")}
    weights = KeyMap(rules(config), template("clip", config)).to_ours(state, where)
    return Checkpoint("clip", plain_config(config), preprocess, None, tokenizer_of(config.text), weights)


def _config(hf: Mapping[str, Any], where: str) -> CLIPConfig:
    architecture = (hf.get("architectures") or [ARCHITECTURE])[0]
    if architecture != ARCHITECTURE:
        raise ValueError(f"{where}: architecture {architecture!r}, expected {ARCHITECTURE!r}")
    # Files of 2022 say the same twice, and transformers goes by the second.
    vision, text = ({**(hf.get(f"{x}_config") or {}), **(hf.get(f"{x}_config_dict") or {})} for x in ("vision", "text"))
    vocab_size, end = text.get("vocab_size", 49408), text.get("eos_token_id", 49407)
    values = {
        "embed_dim": hf.get("projection_dim", 512),
        "vision": {
            **_stack(vision, "vision", 3072, where),
            **{ours: vision.get(_RENAMED.get(ours, ours), default) for ours, default in _VISION_FIELDS},
            "num_classes": 0,
            "patch_bias": False,
            "pre_norm": True,
        },
        "text": {
            **_stack(text, "text", 2048, where),
            "context_length": text.get("max_position_embeddings", 77),
            "vocab_size": vocab_size,
            "end_token": vocab_size - 1 if end == _LEGACY_END else end,
        },
    }
    config: CLIPConfig = build_config("clip", values, where)
    return config


def _stack(hf: Mapping[str, Any], tower: str, hidden: int, where: str) -> dict[str, Any]:
    values = {ours: hf.get(theirs, seen if tower == "vision" else read) for theirs, ours, seen, read in _FIELDS}
    field = f"{tower}_config.hidden_act"
    return {
        **values,
        "mlp_ratio": hf.get("intermediate_size", hidden) / values["embed_dim"],
        "activation": read_activation(hf.get("hidden_act", "quick_gelu"), field, where),
        "init": "clip",
    }


def _preprocess(folder: Path, config: CLIPConfig) -> dict[str, Any] | None:
    """preprocessor_config.json in this suite's words; None without the file."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    hf = {"resample": 3, "do_center_crop": True, "size": 224, "crop_size": 224, **read_json(path)}
    size = list(config.vision.image_hw)
    return {"size": size, **read_pixels(hf, path, OPENAI_MEAN, OPENAI_STD), **read_crop(hf)}


# ---------------------------------------------------------------------------------------------------------- writing


def to_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `CLIPModel.from_pretrained` takes.

    Raises:
        ValueError: the model has something that HF's does not have.
    """
    where = "export to HF CLIP"
    config: CLIPConfig = build_config(checkpoint.task, checkpoint.config, where)
    vision, text = config.vision, config.text
    require_published(
        config,
        where,
        **{
            "vision.image_size": (vision.image_hw[0], (vision.image_hw[0],) * 2),
            "vision.patch_size": (vision.patch_hw[0], (vision.patch_hw[0],) * 2),
            "vision.pool": ("cls",),
            "vision.pre_norm": (True,),
            "vision.layer_scale": (None,),
            "text.layer_scale": (None,),
            "logit_bias": (None,),
        },
    )
    if text.end_token == _LEGACY_END:
        raise ValueError(f"{where}: that format cannot express text.end_token {_LEGACY_END}")
    state = KeyMap(rules(config), template("clip", config)).to_theirs(checkpoint.state_dict, where)
    hf = {
        "model_type": "clip",
        "architectures": [ARCHITECTURE],
        "projection_dim": config.embed_dim,
        "vision_config": {
            "model_type": "clip_vision_model",
            **_tower(vision),
            "image_size": vision.image_hw[0],
            "patch_size": vision.patch_hw[0],
            "num_channels": vision.in_channels,
            "projection_dim": config.embed_dim,
        },
        "text_config": {
            "model_type": "clip_text_model",
            **_tower(text),
            "max_position_embeddings": text.context_length,
            "vocab_size": text.vocab_size,
            "bos_token_id": text.end_token - 1,
            "eos_token_id": text.end_token,
            "projection_dim": config.embed_dim,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    write_json(folder / "config.json", hf)
    if checkpoint.preprocess is not None:
        write_json(folder / "preprocessor_config.json", _preprocessor(checkpoint.preprocess, where))


def _tower(stack: Any) -> dict[str, Any]:
    return {
        **{theirs: getattr(stack, ours) for theirs, ours, *_ in _FIELDS},
        "intermediate_size": round(stack.embed_dim * stack.mlp_ratio),
        "hidden_act": write_activation(stack.activation),
    }


def _preprocessor(preprocess: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_center_crop": False,
        **write_crop(preprocess, where),
        "do_convert_rgb": len(preprocess["mean"]) == 3,
        **write_pixels(preprocess),
    }
