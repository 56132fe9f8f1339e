"""timm's Vision Transformers: `timm.models.vision_transformer` and `timm.models.deit` with the standard block.

A config is read off a timm module, never guessed from names or shapes: for a file or a folder the module is first built
without memory, on the meta device.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from multimodal.blocks.mlp import Activation
from multimodal.blocks.residual import NormKind
from multimodal.models.vit import ViTConfig
from multimodal.pretrained.files import one_line, read_folder_weights
from multimodal.pretrained.keymap import Join, KeyMap, Reshape, Rule, Split
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, require, template

# ------------------------------------------------------------------------------------------------------- the table


def rules(config: ViTConfig, *, packed: bool = True) -> list[Rule]:
    """timm's names and ours.

    Args:
        config: of the model.
        packed: a gated MLP holds gate and value in one matrix (`SwiGLUPacked`), or in two (`SwiGLU`).
    """
    dim = config.embed_dim
    ours, mlp = "encoder.blocks.*", "blocks.*.mlp"
    table = [
        Rule("patch_embed.proj.weight", "patch_embed.proj.weight", (_patch(config),)),
        Rule("patch_embed.proj.bias", "patch_embed.proj.bias"),
        Rule("patch_embed.norm.*", "patch_norm.*"),
        Rule("pos_embed", "position", (Reshape((1, -1, dim), (-1, dim)),)),
        Rule("norm_pre.*", "pre_norm.*"),
        Rule("blocks.*.norm1.*", f"{ours}.self_attn_residual.norm.*"),
        Rule("blocks.*.attn.qkv.*", tuple(f"{ours}.self_attn.{x}_proj.*" for x in "qkv"), (Split(3),)),
        Rule("blocks.*.attn.q_norm.*", f"{ours}.self_attn.q_norm.*"),
        Rule("blocks.*.attn.k_norm.*", f"{ours}.self_attn.k_norm.*"),
        Rule("blocks.*.attn.proj.*", f"{ours}.self_attn.out_proj.*"),
        Rule("blocks.*.ls1.gamma", f"{ours}.self_attn_residual.layer_scale.gamma"),
        Rule("blocks.*.norm2.*", f"{ours}.mlp_residual.norm.*"),
        Rule(f"{mlp}.fc2.*", f"{ours}.mlp.fc2.*"),
        Rule("blocks.*.ls2.gamma", f"{ours}.mlp_residual.layer_scale.gamma"),
        Rule("norm.*", "encoder.norm.*"),
        Rule("fc_norm.*", "pool_norm.*"),
        Rule("head.*", "head.*"),
        Rule("head_dist.*", "distilled_head.*"),
    ]
    if not config.gated:
        table.append(Rule(f"{mlp}.fc1.*", f"{ours}.mlp.fc1.*"))
    elif packed:
        table.append(Rule(f"{mlp}.fc1.*", (f"{ours}.mlp.gate.*", f"{ours}.mlp.fc1.*"), (Split(2),)))
    else:
        table += [Rule(f"{mlp}.fc1_g.*", f"{ours}.mlp.gate.*"), Rule(f"{mlp}.fc1_x.*", f"{ours}.mlp.fc1.*")]
    tokens = {
        "cls_token": int(config.class_token),
        "dist_token": int(config.distilled),
        "reg_token": config.num_registers,
    }
    present = {name: count for name, count in tokens.items() if count}
    if present:
        stack = (Join(tuple(present.values()), dim=1), Reshape((1, -1, dim), (-1, dim)))
        table.append(Rule(tuple(present), "prefix", stack))
    return table


def _patch(config: ViTConfig) -> Reshape:
    """A convolution's kernel as the matrix of a Linear over flattened patches."""
    return Reshape((config.embed_dim, config.in_channels, *config.patch_hw), (config.embed_dim, -1))


# ---------------------------------------------------------------------------------------------- from a timm module

_ACTIVATIONS: dict[str, Activation] = {
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "SiLU": "silu",
    "Swish": "silu",
    "ReLU": "relu",
}
_NORMS: dict[str, NormKind] = {"LayerNorm": "layer", "RmsNorm": "rms"}
_POOLS: dict[str, Literal["cls", "mean"]] = {"token": "cls", "avg": "mean"}


def _kind(module: Any) -> str:
    return type(module).__name__


def _absent(module: Any) -> bool:
    return module is None or isinstance(module, nn.Identity)


def _norms(module: Any) -> set[tuple[str, float]]:
    """(class, eps) of every norm of the model."""
    found = [module.patch_embed.norm, module.norm_pre, module.norm, module.fc_norm]
    for block in module.blocks:
        found += [block.norm1, block.norm2, block.attn.q_norm, block.attn.k_norm]
    return {(_kind(norm), getattr(norm, "eps", 0.0)) for norm in found if not _absent(norm)}


# Reasons why a module is not covered, in order: a later one may rely on what an earlier one made sure of.
_REFUSALS: tuple[Callable[[Any], str | None], ...] = (
    lambda m: None if _kind(m) in ("VisionTransformer", "VisionTransformerDistilled") else f"its class is {_kind(m)}",
    lambda m: None if _kind(m.patch_embed) == "PatchEmbed" else f"its patch embedding is {_kind(m.patch_embed)}",
    lambda m: "it pads images to whole patches" if m.patch_embed.dynamic_img_pad else None,
    lambda m: None if _kind(m.blocks[0]) == "Block" else f"its blocks are {_kind(m.blocks[0])}",
    lambda m: None if _kind(m.blocks[0].attn) == "Attention" else f"its attention is {_kind(m.blocks[0].attn)}",
    lambda m: "its attention is gated" if getattr(m.blocks[0].attn, "gate", None) is not None else None,
    lambda m: None if _absent(getattr(m.blocks[0].attn, "norm", None)) else "it has a norm inside attention",
    lambda m: None if _absent(m.blocks[0].mlp.norm) else "it has a norm inside the MLP",
    lambda m: None if _is_known_mlp(m.blocks[0].mlp) else f"its MLP is {_kind(m.blocks[0].mlp)}",
    lambda m: None if m.global_pool in _POOLS else f"it pools by {m.global_pool!r}",
    lambda m: "its pooling includes the prefix tokens" if m.pool_include_prefix else None,
    lambda m: None if len(_norms(m)) == 1 and _norm_kind(m) in _NORMS else f"its norms are {sorted(_norms(m))}",
    lambda m: None if _absent(m.norm) or _absent(m.fc_norm) else "it has a norm before and after pooling",
    lambda m: _remainder(m.patch_embed.img_size, m.patch_embed.patch_size),
)


def _remainder(image: tuple[int, int], patch: tuple[int, int]) -> str | None:
    """timm's convolution leaves out pixels at the edge that fill no patch; here that is an error."""
    whole = all(side % part == 0 for side, part in zip(image, patch, strict=True))
    return None if whole else f"its image size {image} is not a multiple of its patch size {patch}"


def _is_known_mlp(mlp: Any) -> bool:
    gate_first = _kind(mlp) == "SwiGLU" or (_kind(mlp) == "GluMlp" and not mlp.gate_last)
    return (_kind(mlp) == "Mlp" or gate_first) and _kind(mlp.act) in _ACTIVATIONS


def _norm_kind(module: Any) -> str:
    return next(iter(_norms(module)))[0]


def refusal(module: nn.Module) -> str | None:
    """Why this timm module is not covered, in a few words; None where it is."""
    return next((reason for reason in (check(module) for check in _REFUSALS) if reason), None)


def config_of(module: nn.Module, where: str) -> ViTConfig:
    """The config of a timm module (one on the meta device does); ValueError with the reason where it is not covered.

    Rates that only training uses are taken over where there is a field for them.
    """
    reason = refusal(module)
    if reason:
        raise ValueError(f"{where}: not covered, because {reason}; expected a timm ViT or DeiT with the standard block")
    m: Any = module
    block, patch, prefix = m.blocks[0], m.patch_embed, {}
    ((norm, eps),) = _norms(m)
    drop_path = tuple(float(getattr(b.drop_path1, "drop_prob", 0.0)) for b in m.blocks)
    distilled = _kind(m) == "VisionTransformerDistilled"
    if m.num_prefix_tokens:
        prefix = {"prefix_position": not m.no_embed_class, "num_registers": m.num_reg_tokens}
    return ViTConfig(
        embed_dim=m.embed_dim,
        depth=len(m.blocks),
        num_heads=block.attn.num_heads,
        head_dim=None if block.attn.head_dim * block.attn.num_heads == m.embed_dim else block.attn.head_dim,
        mlp_ratio=block.mlp.fc2.in_features / m.embed_dim,
        activation=_activation(block.mlp.act),
        gated=_kind(block.mlp) != "Mlp",
        norm=_NORMS[norm],
        norm_eps=eps,
        final_norm=not (_absent(m.norm) and _absent(m.fc_norm)),
        qkv_bias=block.attn.qkv.bias is not None,
        out_bias=block.attn.proj.bias is not None,
        mlp_bias=block.mlp.fc2.bias is not None,
        qk_norm=not _absent(block.attn.q_norm),
        layer_scale=None if _absent(block.ls1) else float(block.ls1.init_values),
        dropout=block.attn.proj_drop.p,
        mlp_dropout=block.mlp.drop1.p,
        attention_dropout=block.attn.attn_drop.p,
        drop_path=drop_path if any(drop_path) else 0.0,
        image_size=_size(patch.img_size),
        patch_size=_size(patch.patch_size),
        in_channels=patch.proj.in_channels,
        num_classes=m.num_classes,
        pool=_POOLS[m.global_pool],
        class_token=m.has_class_token,
        distilled=distilled,
        position="none" if m.pos_embed is None else "learned",
        patch_bias=patch.proj.bias is not None,
        patch_norm=not _absent(patch.norm),
        pre_norm=not _absent(m.norm_pre),
        pool_norm=not _absent(m.fc_norm),
        head_dropout=m.head_drop.p,
        patch_dropout=getattr(m.patch_drop, "prob", 0.0),
        **prefix,
    )


def _activation(act: nn.Module) -> Activation:
    return "gelu_tanh" if getattr(act, "approximate", None) == "tanh" else _ACTIVATIONS[_kind(act)]


def _size(pair: tuple[int, int]) -> int | tuple[int, int]:
    return pair[0] if pair[0] == pair[1] else (pair[0], pair[1])


def _checkpoint(module: nn.Module, state: Mapping[str, Tensor], where: str, *, known: bool = True) -> Checkpoint:
    """timm weights with the architecture of a module; `known` = its `pretrained_cfg` belongs to these weights."""
    config = config_of(module, where)
    m: Any = module
    names = KeyMap(rules(config, packed=_kind(m.blocks[0].mlp) != "SwiGLU"), template("vit", config))
    weights = names.to_ours(state, where)
    cfg = (getattr(module, "pretrained_cfg", None) or {}) if known else {}
    return Checkpoint("vit", plain_config(config), _preprocess(cfg, config), _labels(cfg, config), None, weights)


def _preprocess(cfg: Mapping[str, Any], config: ViTConfig) -> dict[str, Any] | None:
    if "mean" not in cfg or len(cfg["mean"]) != config.in_channels:
        return None
    return {
        "size": list(config.image_hw),
        "mean": list(cfg["mean"]),
        "std": list(cfg["std"]),
        "interpolation": cfg["interpolation"],
        "crop_pct": cfg["crop_pct"],
        "crop_mode": cfg["crop_mode"],
    }


def _labels(cfg: Mapping[str, Any], config: ViTConfig) -> list[str] | None:
    """Names of the classes: what the weights bring along, or ImageNet's where tag and number of classes say so."""
    names, descriptions = cfg.get("label_names"), cfg.get("label_descriptions") or {}
    if names:
        if isinstance(names, Mapping):  # by index, which JSON turns into text
            names = [names[index] for index in sorted(names, key=int)]
        return [descriptions.get(name, name) for name in names] if len(names) == config.num_classes else None
    from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": config.num_classes})
    trained_on = re.findall(r"in(\d+k)", cfg.get("tag") or "")
    if not subset or not trained_on or subset.split("-")[1] != trained_on[-1]:
        return None
    info = ImageNetInfo(subset)
    described = info.label_descriptions()
    count = Counter(described)  # "crane" is a bird and a machine: the WordNet id tells them apart
    named = zip(described, info.label_names(), strict=True)
    return [text if count[text] == 1 else f"{text} ({synset})" for text, synset in named]


# ----------------------------------------------------------------------------------------- the sources, and the export


def read_module(module: nn.Module) -> Checkpoint:
    """A timm module in memory; ValueError with the reason where it is not covered."""
    return _checkpoint(module, module.state_dict(), f"timm {_kind(module)}")


def read_published(name: str) -> Checkpoint:
    """Weights that timm publishes, `NAME[.TAG]`, fetched by timm itself; refused before anything is fetched."""
    import timm

    where = f"timm:{name}"
    if name not in (known := {*timm.list_models(), *timm.list_pretrained()}):
        near = get_close_matches(name, known, n=1)
        raise ValueError(f"{where}: timm has no such weights" + (f", did you mean timm:{near[0]}?" if near else ""))
    config_of(build_on_meta(name, where), where)
    try:
        module = timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever a network, a cache or timm itself may raise
        raise ValueError(
            f"{where}: timm.create_model({name!r}, pretrained=True) failed ({_kind(error)}: {one_line(error)}); "
            "expected a network or timm's cache, or else give a file or folder with the weights"
        ) from error
    return _checkpoint(module, module.state_dict(), where)


def read_folder(folder: Path) -> Checkpoint:
    """A folder in the layout of timm's hub: config.json with `architecture` and `pretrained_cfg`, and the weights."""
    return _checkpoint(build_on_meta(f"local-dir:{folder}", str(folder)), read_folder_weights(folder), str(folder))


def read_file(path: Path, state: Mapping[str, Tensor]) -> Checkpoint:
    """The weights of a bare file, named `NAME[.TAG].safetensors` (or .pth, .bin, .pt) as timm's hub names them.

    Heads, channels and preprocessing are not in such a file: the first two are read off its shapes, the last belongs to
    the tag, and is unknown without one.
    """
    import timm

    stem = path.name.removesuffix(path.suffix)
    architecture = stem.partition(".")[0]
    if not timm.is_model(architecture):
        raise ValueError(
            f"{path}: the file does not say which architecture it holds; name it as timm does, such as "
            "vit_small_patch16_224.augreg_in21k_ft_in1k.safetensors, or give a folder with config.json"
        )
    known = stem in timm.list_pretrained()
    if not known:
        warnings.warn(f"{path}: the name has no tag of timm's, so preprocessing and labels are not known", stacklevel=2)
    head, patch = state.get("head.weight"), state.get("patch_embed.proj.weight")
    num_classes, in_chans = 0 if head is None else len(head), 3 if patch is None else patch.shape[1]
    module = build_on_meta(stem if known else architecture, str(path), num_classes=num_classes, in_chans=in_chans)
    return _checkpoint(module, state, str(path), known=known)


def build_on_meta(name: str, where: str, **options: Any) -> nn.Module:
    """The timm model of that name without memory for its weights."""
    import timm

    try:
        with torch.device("meta"):
            module: nn.Module = timm.create_model(name, **options)
    except Exception as error:  # timm raises as many kinds as it has models
        raise ValueError(f"{where}: timm cannot build it ({_kind(error)}: {one_line(error)})") from error
    return module


def to_timm(checkpoint: Checkpoint, *, packed: bool = True) -> dict[str, Tensor]:
    """The weights under timm's names, as `timm.create_model(...).load_state_dict` takes them.

    Args:
        checkpoint: of task vit.
        packed: see `rules`; timm's AIMv2 models want False, all its others True.

    Raises:
        ValueError: the model has something that timm's does not have.
    """
    where = "export to timm"
    config = build_config(checkpoint.task, checkpoint.config, where)
    require_timm(config, where)
    names = KeyMap(rules(config, packed=packed), template(checkpoint.task, config))
    return names.to_theirs(checkpoint.state_dict, where)


def require_timm(config: ViTConfig, where: str) -> None:
    """ValueError that names what timm's models never have."""
    require(
        config,
        {
            "norm_order": ("pre",),
            "num_kv_heads": (None, config.num_heads),
            "key_bias": (True,),
            "rope": (None,),
            "patch_bias": (not config.pre_norm,),
            "mlp_bias": (config.out_bias,),
        },
        where,
    )
