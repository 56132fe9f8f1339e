"""open_clip and OpenAI's CLIP, which share their names: modules, published weights, folders and bare files.

A module says what it is, so a config of open_clip's is read off the module that it builds without memory.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.blocks.mlp import Activation
from multimodal.models.clip import CLIPConfig
from multimodal.models.vit import ViTConfig
from multimodal.pretrained.files import one_line, read_json, read_weights
from multimodal.pretrained.keymap import KeyMap, Reshape, Rule, Split, Transpose
from multimodal.pretrained.published_clip import (
    OPENAI_MEAN,
    OPENAI_STD,
    square,
    tokenizer_of,
)
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"
_OLD_WEIGHTS = "open_clip_pytorch_model.bin"
_OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
"""Numbers that OpenAI's state dicts hold beside the weights."""
_HEAD_WIDTH = 64
"""Of nearly every published model; a bare file does not show it."""

# ------------------------------------------------------------------------------------------------------- the tables


def rules(config: CLIPConfig, *, text: str = "", scalar: bool = True) -> list[Rule]:
    """Their names and ours.

    Args:
        config: of the model.
        text: what the names of the text tower begin with: `text.` where that is a module of its own.
        scalar: whether scale and bias of the logits are single numbers, not vectors of one.
    """
    vision, number = config.vision, (Reshape((), (1,)),) if scalar else ()
    patch = Reshape((vision.embed_dim, vision.in_channels, *vision.patch_hw), (vision.embed_dim, -1))
    return [
        Rule("visual.conv1.weight", "vision.patch_embed.proj.weight", (patch,)),
        Rule("visual.class_embedding", "vision.prefix", (Reshape((-1,), (1, -1)),)),
        Rule("visual.positional_embedding", "vision.position"),
        Rule("visual.ln_pre.*", "vision.pre_norm.*"),
        *_block_rules("visual.transformer", "vision.encoder"),
        Rule("visual.ln_post.*", "vision.pool_norm.*" if vision.pool_norm else "vision.encoder.norm.*"),
        Rule("visual.proj", "vision_proj.weight", (Transpose(),)),
        Rule(f"{text}token_embedding.weight", "text.token_embed.weight"),
        Rule(f"{text}positional_embedding", "text.position.weight"),
        *_block_rules(f"{text}transformer", "text.encoder"),
        Rule(f"{text}ln_final.*", "text.encoder.norm.*"),
        Rule(f"{text}text_projection", "text_proj.weight", (Transpose(),)),
        Rule("logit_scale", "logit_scale", number),
        Rule("logit_bias", "logit_bias", number),
    ]


def _block_rules(theirs: str, ours: str) -> list[Rule]:
    theirs, ours = f"{theirs}.resblocks.*", f"{ours}.blocks.*"
    table = [
        Rule(f"{theirs}.attn.in_proj_{kind}", tuple(f"{ours}.self_attn.{x}_proj.{kind}" for x in "qkv"), (Split(3),))
        for kind in ("weight", "bias")
    ]
    names = {
        "ln_1.*": "self_attn_residual.norm.*",
        "attn.out_proj.*": "self_attn.out_proj.*",
        "ls_1.gamma": "self_attn_residual.layer_scale.gamma",
        "ln_2.*": "mlp_residual.norm.*",
        "mlp.c_fc.*": "mlp.fc1.*",
        "mlp.c_proj.*": "mlp.fc2.*",
        "ls_2.gamma": "mlp_residual.layer_scale.gamma",
    }
    return [*table, *(Rule(f"{theirs}.{a}", f"{ours}.{b}") for a, b in names.items())]


# ------------------------------------------------------------------------------------------ from a module of open_clip


def _kind(module: Any) -> str:
    return type(module).__name__


def _text(module: Any) -> Any:
    """What holds the text tower's parts."""
    return module if _kind(module) == "CLIP" else module.text


def _text_pool(module: Any) -> str:
    return module.text_pool_type if _kind(module) == "CLIP" else module.text.pool_type


def _blocks(module: Any) -> list[Any]:
    return [*module.visual.transformer.resblocks, *_text(module).transformer.resblocks]


def _norms(module: Any) -> set[tuple[str, float]]:
    """(class, eps) of every norm of the model; open_clip's two LayerNorms differ in the types that they take."""
    found = [module.visual.ln_pre, module.visual.ln_post, _text(module).ln_final]
    found += [norm for block in _blocks(module) for norm in (block.ln_1, block.ln_2)]
    return {(_kind(n).removesuffix("Fp32"), getattr(n, "eps", 0.0)) for n in found if not isinstance(n, nn.Identity)}


def _activation(block: Any) -> Activation | None:
    act = block.mlp.gelu
    if _kind(act) == "GELU":
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    return "quick_gelu" if _kind(act) == "QuickGELU" else None


# Reasons why a module is not covered, in order: a later one may rely on what an earlier one made sure of.
_REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    lambda m: None if _kind(m) in ("CLIP", "CustomTextCLIP") else f"its class is {_kind(m)}",
    lambda m: None if _kind(m.visual) == "VisionTransformer" else f"its image tower is {_kind(m.visual)}",
    lambda m: (
        None if _kind(m) == "CLIP" or _kind(m.text) == "TextTransformer" else f"its text tower is {_kind(m.text)}"
    ),
    lambda m: None if m.visual.attn_pool is None else "its image tower pools by attention",
    lambda m: None if m.visual.pool_type in ("tok", "avg") else f"its image tower pools by {m.visual.pool_type!r}",
    lambda m: None if m.visual.positional_embedding.requires_grad else "the positions of its patches are fixed",
    lambda m: next((f"its blocks are {_kind(b)}" for b in _blocks(m) if _kind(b) != "ResidualAttentionBlock"), None),
    lambda m: None if all(map(_activation, _blocks(m))) else f"its activation is {_kind(_blocks(m)[0].mlp.gelu)}",
    lambda m: None if len(_norms(m)) == 1 else f"its norms are {sorted(_norms(m))}",
    lambda m: None if _text_pool(m) in ("argmax", "eos") else f"its text tower pools by {_text_pool(m)!r}",
    lambda m: None if _text(m).attn_mask is not None else "its text tower is not causal",
    lambda m: "its text tower has a class token" if getattr(_text(m), "cls_emb", None) is not None else None,
    lambda m: None if isinstance(_text(m).text_projection, nn.Parameter) else "its text projection has a bias",
)


def config_of(module: nn.Module, where: str) -> CLIPConfig:
    """The config of a module (one on the meta device does); ValueError with the reason where it is not covered."""
    reason = next((found for found in (check(module) for check in _REFUSALS) if found), None)
    if reason:
        raise ValueError(f"{where}: not covered, because {reason}; expected a CLIP of two plain Transformers")
    m: Any = module
    text, visual = _text(m), m.visual
    ((_, eps),) = _norms(m)
    vocab_size = text.token_embedding.num_embeddings
    end = (m.text_eos_id if text is m else text.eos_id) if _text_pool(m) == "eos" else vocab_size - 1
    values = {
        "embed_dim": visual.proj.shape[1],
        "vision": {
            **_stack(visual.transformer, eps),
            "image_size": square(visual.image_size),
            "patch_size": square(visual.patch_size),
            "in_channels": visual.conv1.in_channels,
            "num_classes": 0,
            "patch_bias": visual.conv1.bias is not None,
            "pre_norm": not isinstance(visual.ln_pre, nn.Identity),
            "pool": {"tok": "cls", "avg": "mean"}[visual.pool_type],
            "pool_norm": visual.final_ln_after_pool,
            "patch_dropout": getattr(visual.patch_dropout, "prob", 0.0),
        },
        "text": {
            **_stack(text.transformer, eps),
            "context_length": text.context_length,
            "vocab_size": vocab_size,
            "end_token": end,
        },
        "logit_bias": None if m.logit_bias is None else -10.0,
    }
    config: CLIPConfig = build_config("clip", values, where)
    return config


def _stack(transformer: Any, eps: float) -> dict[str, Any]:
    blocks = list(transformer.resblocks)
    block = blocks[0]
    width = block.attn.embed_dim
    return {
        "embed_dim": width,
        "depth": len(blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": block.mlp.c_fc.out_features / width,
        "activation": _activation(block),
        "norm_eps": eps,
        "layer_scale": None if isinstance(block.ls_1, nn.Identity) else 1e-5,
        "init": "clip",
    }


def _checkpoint(
    module: nn.Module, state: Mapping[str, Tensor], where: str, preprocess: Mapping[str, Any] | None
) -> Checkpoint:
    """Weights with the architecture of a module; `preprocess` in open_clip's words."""
    config = config_of(module, where)
    m: Any = module
    table = rules(config, text="" if _text(m) is m else "text.", scalar=m.logit_scale.dim() == 0)
    weights = KeyMap(table, template("clip", config)).to_ours(state, where)
    read = None if preprocess is None else _read_preprocess(preprocess, config.vision, where)
    return Checkpoint("clip", plain_config(config), read, None, tokenizer_of(config.text), weights)


def _read_preprocess(cfg: Mapping[str, Any], vision: ViTConfig, where: str) -> dict[str, Any]:
    mode, interpolation = cfg.get("resize_mode", "shortest"), cfg.get("interpolation", "bicubic")
    for name, value, known in (
        ("resize_mode", mode, ("shortest", "squash")),
        ("interpolation", interpolation, ("bicubic", "bilinear", "random")),
    ):
        if value not in known:
            raise ValueError(f"{where}: its preprocess_cfg has {name} {value!r}, expected {' or '.join(known)}")
    return {
        "size": list(vision.image_hw),
        "mean": list(cfg.get("mean", OPENAI_MEAN)),
        "std": list(cfg.get("std", OPENAI_STD)),
        "interpolation": "bicubic" if interpolation == "random" else interpolation,  # random is for training alone
        "crop_pct": 1.0,
        "crop_mode": "squash" if mode == "squash" else "center",
    }


# ------------------------------------------------------------------------------------------------------- the sources


def read_module(module: nn.Module) -> Checkpoint:
    """A module of open_clip in memory; ValueError with the reason where it is not covered."""
    m: Any = module
    preprocess = getattr(getattr(m, "visual", None), "preprocess_cfg", None)
    return _checkpoint(module, module.state_dict(), f"open_clip {_kind(module)}", preprocess)


def read_published(name: str) -> Checkpoint:
    """Weights that open_clip publishes, `NAME/TAG`, fetched by open_clip itself; refused before anything is fetched."""
    import open_clip

    where = f"open_clip:{name}"
    known = [f"{model}/{tag}" for model, tag in open_clip.list_pretrained()]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        tried = f"did you mean open_clip:{near[0]}?" if near else "expected open_clip:NAME/TAG"
        raise ValueError(f"{where}: open_clip has no such weights, {tried}")
    model, tag = name.rsplit("/", 1)
    config_of(_on_meta(open_clip.get_model_config(model), where), where)
    quick = bool(open_clip.pretrained.get_pretrained_cfg(model, tag).get("quick_gelu"))
    try:
        module = open_clip.create_model(model, tag, force_quick_gelu=quick)
    except Exception as error:  # whatever a network, a cache or open_clip itself may raise
        raise ValueError(
            f"{where}: open_clip.create_model({model!r}, {tag!r}) failed ({_kind(error)}: {one_line(error)}); "
            "expected a network or the hub's cache, or else give a file or folder with the weights"
        ) from error
    return _checkpoint(module, module.state_dict(), where, module.visual.preprocess_cfg)


def read_folder(folder: Path) -> Checkpoint:
    """A folder in the layout of open_clip's hub: open_clip_config.json and the weights."""
    path = next((folder / name for name in (WEIGHTS, _OLD_WEIGHTS) if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder}: no weights, expected {WEIGHTS} or {_OLD_WEIGHTS}")
    return _read_described(read_json(folder / CONFIG), read_weights(path), str(folder))


def read_file(path: Path, state: Mapping[str, Tensor]) -> Checkpoint:
    """A bare file: with a config beside it as open_clip_config.json, or else what its shapes show.

    They do not show how wide a head is, which is known of published sizes and else 64; and which GELU there is:
    OpenAI's weights, and those whose file has `quickgelu` or `openai` in its name, have the quick one.
    """
    state = {key.removeprefix("module."): value for key, value in state.items()}
    beside = path.with_name(CONFIG)
    if beside.is_file():
        return _read_described(read_json(beside), state, str(path))
    quick = _has_quick_gelu(path, state)
    state = {key: value for key, value in state.items() if key not in _OPENAI_MARKS}
    module = _on_meta({**_model_cfg_by_shapes(state, path), "quick_gelu": quick}, str(path))
    return _checkpoint(module, state, str(path), {})


def _read_described(described: Mapping[str, Any], state: Mapping[str, Tensor], where: str) -> Checkpoint:
    cfg, preprocess = described.get("model_cfg", described), described.get("preprocess_cfg", {})
    if not isinstance(cfg, Mapping) or not isinstance(preprocess, Mapping):
        raise ValueError(f"{where}: {CONFIG} holds no model_cfg and preprocess_cfg, expected open_clip's own")
    return _checkpoint(_on_meta(cfg, where), state, where, preprocess)


def _on_meta(model_cfg: Mapping[str, Any], where: str) -> nn.Module:
    """The module that a config of open_clip's describes, without memory for its weights, or any download."""
    from open_clip.model import CLIP, CustomTextCLIP

    cfg = {key: value for key, value in model_cfg.items() if key != "custom_text"}
    for tower, library in (("vision_cfg", "timm"), ("text_cfg", "hf")):
        part = cfg.get(tower)
        if not isinstance(part, Mapping):
            raise ValueError(f"{where}: its config has {tower} {part!r:.80}, expected a table of fields")
        foreign = part.get(f"{library}_model_name")
        if foreign:
            raise ValueError(f"{where}: not covered, because its {tower} is {library}'s {foreign!r}; "
                             "expected a CLIP of two plain Transformers")  # fmt: skip
    if "multimodal_cfg" in cfg:
        raise ValueError(f"{where}: not covered, because it is a CoCa; expected a CLIP of two plain Transformers")
    build = CustomTextCLIP if model_cfg.get("custom_text") else CLIP
    try:
        with torch.device("meta"):
            module: nn.Module = build(**cfg)
    except Exception as error:  # as many kinds as a config may have faults
        raise ValueError(f"{where}: open_clip cannot build it ({_kind(error)}: {one_line(error)})") from error
    return module


def _has_quick_gelu(path: Path, state: Mapping[str, Tensor]) -> bool:
    if any(mark in state for mark in _OPENAI_MARKS) or re.search("quickgelu|openai", path.name.lower()):
        return True
    warnings.warn(
        f"{path}: the file does not say which GELU its model has; it is taken as the exact one, since its name has "
        f"neither 'quickgelu' nor 'openai' in it and no {CONFIG} is beside it",
        stacklevel=4,
    )
    return False


def _model_cfg_by_shapes(state: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """A config of open_clip's by the shapes of the weights."""
    custom = "text.token_embedding.weight" in state
    text = "text." if custom else ""
    shapes: dict[str, torch.Size] = {}
    for name, dims in (("visual.conv1.weight", 4), ("visual.positional_embedding", 2), ("visual.proj", 2),
                       (f"{text}token_embedding.weight", 2), (f"{text}positional_embedding", 2)):  # fmt: skip
        if name not in state or state[name].dim() != dims or not state[name].numel():
            found = f"with {name} of shape {list(state[name].shape)}" if name in state else f"without {name}"
            raise ValueError(f"{path}: holds a model {found}, expected a CLIP of two plain Transformers")
        shapes[name.removeprefix("text.")] = state[name].shape
    width, _, patch, _ = shapes["visual.conv1.weight"]
    side = math.isqrt(shapes["visual.positional_embedding"][0] - 1)
    vocab_size, text_width = shapes["token_embedding.weight"]
    vision = _stack_cfg(state, "visual.transformer", width, path)
    bias = {"init_logit_bias": -10.0} if "logit_bias" in state else {}
    return {
        "embed_dim": shapes["visual.proj"][1],
        "vision_cfg": {
            "image_size": side * patch,
            "patch_size": patch,
            "width": width,
            "head_width": _head_width(width, vision["layers"]),
            **vision,
            "no_ln_pre": "visual.ln_pre.weight" not in state,
        },
        "text_cfg": {
            "context_length": shapes["positional_embedding"][0],
            "vocab_size": vocab_size,
            "width": text_width,
            "heads": max(1, text_width // _HEAD_WIDTH),
            **_stack_cfg(state, f"{text}transformer", text_width, path),
        },
        "custom_text": custom,
        "nonscalar_logit_scale": "logit_scale" in state and state["logit_scale"].dim() == 1,
        **bias,
    }


def _head_width(width: int, layers: int) -> int:
    """That of the published image towers of this size, where they agree."""
    import open_clip

    towers = [open_clip.get_model_config(name)["vision_cfg"] for name in open_clip.list_models()]
    known = {
        each.get("head_width", _HEAD_WIDTH)
        for each in towers
        if (each.get("width"), each.get("layers")) == (width, layers)
    }
    return known.pop() if len(known) == 1 else _HEAD_WIDTH


def _stack_cfg(state: Mapping[str, Tensor], name: str, width: int, path: Path) -> dict[str, Any]:
    blocks = {key.removeprefix(f"{name}.resblocks.").split(".")[0] for key in state if key.startswith(f"{name}.resb")}
    hidden = state.get(f"{name}.resblocks.0.mlp.c_fc.bias")
    if hidden is None:
        raise ValueError(f"{path}: holds a model without {name}.resblocks.0.mlp.c_fc.bias, expected a CLIP")
    scaled = f"{name}.resblocks.0.ls_1.gamma" in state
    return {
        "layers": len(blocks),
        "mlp_ratio": mlp_ratio(len(hidden), width),
        "ls_init_value": 1e-5 if scaled else None,
    }


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio of which open_clip, which rounds down, makes this hidden width."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
