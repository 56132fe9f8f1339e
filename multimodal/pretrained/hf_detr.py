"""Hugging Face's DETR: folders of `DetrForObjectDetection`, under the key names that are published.

Those differ from the names in memory since transformers 5, and transformers translates at its own door: a module in
memory is therefore saved and read back. Reading and writing folders needs no transformers.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal.blocks.backbone import build_backbone
from multimodal.blocks.frozen_norm import FrozenNorm, has_activation
from multimodal.models.detr import LAYERS, DETRConfig
from multimodal.pretrained.files import one_line, read_folder_weights, read_json, write_safetensors
from multimodal.pretrained.hf import (
    named,
    read_activation,
    read_labels,
    read_pixels,
    read_saved,
    write_activation,
    write_json,
    write_labels,
    write_pixels,
)
from multimodal.pretrained.keymap import KeyMap, Rule
from multimodal.pretrained.published_detr import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    LONGEST_EDGE,
    RESNETS,
    SHORTEST_EDGE,
    backbone_rules,
    is_counter,
    require_published,
)
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

ARCHITECTURE = "DetrForObjectDetection"
_BACKBONE = "model.backbone.conv_encoder.model."

# ------------------------------------------------------------------------------------------------------- the tables


def rules(config: DETRConfig, *, own_resnet: bool = False) -> list[Rule]:
    """HF's published names and ours; `own_resnet` where the backbone is HF's ResNet and not timm's."""
    table = [
        *(_resnet_rules() if own_resnet else backbone_rules(config, _BACKBONE)),
        Rule("model.input_projection.*", "input_proj.*"),
        Rule("model.query_position_embeddings.weight", "queries.embed.weight"),
        Rule("model.decoder.layernorm.*", "decoder.norm.*"),
        Rule("class_labels_classifier.*", "class_head.*"),
        Rule("bbox_predictor.layers.*.*", "box_head.layers.*.*"),
    ]
    for side in ("encoder", "decoder"):
        theirs, ours = f"model.{side}.layers.*", f"{side}.blocks.*"
        attentions = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if side == "decoder" else {})
        for a, b in attentions.items():
            table.append(Rule(f"{theirs}.{a}.*.*", f"{ours}.{b}.*.*"))
            table.append(Rule(f"{theirs}.{a}_layer_norm.*", f"{ours}.{b}_residual.norm.*"))
        table.append(Rule(f"{theirs}.final_layer_norm.*", f"{ours}.mlp_residual.norm.*"))
        table += [Rule(f"{theirs}.{fc}.*", f"{ours}.mlp.{fc}.*") for fc in ("fc1", "fc2")]
    return table


def _resnet_rules() -> list[Rule]:
    """HF's names of a ResNet and timm's."""
    theirs, ours = f"{_BACKBONE}embedder.embedder", "backbone.net"
    table = [
        Rule(f"{theirs}.convolution.weight", f"{ours}.conv1.weight"),
        Rule(f"{theirs}.normalization.*", f"{ours}.bn1.*"),
    ]
    for stage in range(4):
        theirs, ours = f"{_BACKBONE}encoder.stages.{stage}.layers.*", f"backbone.net.layer{stage + 1}.*"
        table.append(Rule(f"{theirs}.shortcut.convolution.weight", f"{ours}.downsample.0.weight"))
        table.append(Rule(f"{theirs}.shortcut.normalization.*", f"{ours}.downsample.1.*"))
        for i in range(3):
            table.append(Rule(f"{theirs}.layer.{i}.convolution.weight", f"{ours}.conv{i + 1}.weight"))
            table.append(Rule(f"{theirs}.layer.{i}.normalization.*", f"{ours}.bn{i + 1}.*"))
    return table


# HF's field, ours of each stack, and the value that a config.json without the field means.
_SHARED: tuple[tuple[str, str, Any], ...] = (
    ("d_model", "embed_dim", 256),
    ("dropout", "dropout", 0.1),
    ("activation_dropout", "mlp_dropout", 0.0),
    ("attention_dropout", "attention_dropout", 0.0),
)
# The same of one side; HF's names begin with the side.
_SIDES: tuple[tuple[str, str, Any], ...] = (("layers", "depth", 6), ("attention_heads", "num_heads", 8))

# ---------------------------------------------------------------------------------------------------------- reading


def read_folder(folder: Path) -> Checkpoint:
    """A folder that `save_pretrained` wrote, or a download from the hub."""
    return _read(folder, str(folder))


def read_module(module: nn.Module) -> Checkpoint:
    """A transformers module in memory."""
    return read_saved(module, _read)


def _read(folder: Path, where: str) -> Checkpoint:
    try:
        hf = read_json(folder / "config.json")
        labels = read_labels(hf)
        config, own_resnet = _config(hf, len(labels), where)
        preprocess = _preprocess(folder)
    except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: its JSON files do not describe a DETR ({one_line(repr(error))})") from error
    state = {key: value for key, value in read_folder_weights(folder).items() if not is_counter(key)}
    table = rules(config, own_resnet=own_resnet)
    weights = KeyMap(table, template("detr", config)).to_ours(state, where)
    return Checkpoint("detr", plain_config(config), preprocess, named(labels), None, weights)


def _config(hf: Mapping[str, Any], num_classes: int, where: str) -> tuple[DETRConfig, bool]:
    """The config, and whether the backbone is HF's own ResNet."""
    architecture = (hf.get("architectures") or [None])[0]
    for name, found, expected in (
        ("architecture", architecture, ARCHITECTURE),
        ("position_embedding_type", hf.get("position_embedding_type", "sine"), "sine"),
        ("num_channels", hf.get("num_channels", 3), 3),
    ):
        if found != expected:
            raise ValueError(f"{where}: {name} {found!r}, expected {expected!r}")
    if hf.get("auxiliary_loss"):
        warnings.warn(
            f"{where}: auxiliary_loss is true, by which transformers norms the tokens after each decoder layer; here "
            "they are not, as in the original DETR, so outputs differ",
            stacklevel=5,
        )
    backbone, dilation, own_resnet = _backbone(hf, where)
    values = {
        "num_classes": num_classes,
        "num_queries": hf.get("num_queries", 100),
        "backbone": backbone,
        "dilation": dilation,
        "encoder": {**_stack(hf, "encoder", where), "final_norm": False},
        "decoder": _stack(hf, "decoder", where),
    }
    config: DETRConfig = build_config("detr", values, where)
    _check_norms(_net(config, where), config, where)
    return config, own_resnet


def _stack(hf: Mapping[str, Any], side: str, where: str) -> dict[str, Any]:
    activation = hf.get("activation_function", "relu")
    return {
        **LAYERS,
        **{ours: hf.get(theirs, default) for theirs, ours, default in _SHARED},
        **{ours: hf.get(f"{side}_{theirs}", default) for theirs, ours, default in _SIDES},
        "mlp_ratio": hf.get(f"{side}_ffn_dim", 2048) / hf.get("d_model", 256),
        "activation": read_activation(activation, "activation_function", where),
    }


def _backbone(hf: Mapping[str, Any], where: str) -> tuple[str, bool, bool]:
    """Its name in timm, whether it is dilated, and whether it is HF's own ResNet."""
    dilation, inner = bool(hf.get("dilation", False)), hf.get("backbone_config")
    if inner is None:
        if not hf.get("use_timm_backbone", True):
            raise ValueError(f"{where}: backbone {hf.get('backbone')!r} of the hub, expected one of timm or a ResNet")
        return hf.get("backbone") or "resnet50", dilation, False
    kind = inner.get("model_type")
    if kind == "timm_backbone":  # whose own field decides, not `dilation`
        stride = inner.get("output_stride") or 32
        if stride not in (16, 32):
            raise ValueError(f"{where}: backbone_config has output_stride {stride}, expected 16 or 32")
        return inner["backbone"], stride == 16, False
    if kind != "resnet":
        raise ValueError(f"{where}: backbone_config has model_type {kind!r}, expected 'timm_backbone' or 'resnet'")
    return _own_resnet(inner, where), False, True


def _own_resnet(inner: Mapping[str, Any], where: str) -> str:
    """The name of HF's ResNet; which is never dilated, whatever `dilation` says."""
    depths = inner.get("depths", [3, 4, 6, 3])
    found = {
        "downsample_in_first_stage": inner.get("downsample_in_first_stage", False),
        "downsample_in_bottleneck": inner.get("downsample_in_bottleneck", False),
        "hidden_act": inner.get("hidden_act", "relu"),
    }
    kind = (inner.get("layer_type", "bottleneck"), depths[2])
    if kind not in RESNETS or found != dict(zip(found, (False, False, "relu"), strict=True)):
        raise ValueError(
            f"{where}: backbone_config has depths {depths} of {kind[0]!r} and {found}, expected a standard ResNet"
        )
    return RESNETS[kind]


def _net(config: DETRConfig, where: str) -> Any:
    """The backbone as timm builds it, without weights."""
    with torch.device("meta"):
        try:
            return build_backbone(config.backbone, dilation=config.dilation).net
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _check_norms(net: nn.Module, config: DETRConfig, where: str) -> None:
    """ValueError where HF's frozen batch norms compute something else than timm's."""
    for module in net.modules():
        if isinstance(module, FrozenNorm) and (module.eps != 1e-5 or has_activation(module)):
            raise ValueError(
                f"{where}: backbone {config.backbone!r} has batch norms with an activation or another eps than 1e-5, "
                "which transformers loses when it freezes them; expected one without, such as resnet50"
            )


def _preprocess(folder: Path) -> dict[str, Any] | None:
    """preprocessor_config.json in this suite's words; None without the file."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return None
    hf = read_json(path)
    size = hf.get("size", {"shortest_edge": SHORTEST_EDGE, "longest_edge": LONGEST_EDGE})
    if isinstance(size, int):  # as in the files of 2021
        size = {"shortest_edge": size, "longest_edge": hf.get("max_size", LONGEST_EDGE)}
    if not hf.get("do_resize", True) or size.keys() != {"shortest_edge", "longest_edge"}:
        found = f"size {size}" if hf.get("do_resize", True) else "do_resize False"
        raise ValueError(f"{path}: {found}, expected images resized to a shortest_edge and a longest_edge")
    return {
        **read_pixels(hf, path, IMAGENET_MEAN, IMAGENET_STD),
        **size,
        "category_ids": hf.get("category_ids"),
    }


# ---------------------------------------------------------------------------------------------------------- writing


def to_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `DetrForObjectDetection.from_pretrained` takes.

    Where classes have ids of their own, preprocessor_config.json holds them as `category_ids`; transformers knows
    classes by their index alone.

    Raises:
        ValueError: the model has something that HF's does not have.
    """
    where = "export to HF DETR"
    config: DETRConfig = build_config(checkpoint.task, checkpoint.config, where)
    if config.backbone == "conv":
        raise ValueError(f"{where}: that format cannot express backbone 'conv'")
    require_published(config, where, **{"decoder.activation": (config.encoder.activation,)})
    net = _net(config, where)
    _check_norms(net, config, where)
    state = KeyMap(rules(config), template("detr", config)).to_theirs(checkpoint.state_dict, where)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    hf = _hf_config(config) | _hf_backbone(config, len(net.feature_info))
    write_json(folder / "config.json", hf | write_labels(checkpoint.labels, config.num_classes))
    if checkpoint.preprocess is not None:
        write_json(folder / "preprocessor_config.json", _preprocessor(checkpoint.preprocess))


def _hf_config(config: DETRConfig) -> dict[str, Any]:
    """config.json but for the labels; the rates of dropout are the decoder's."""
    hf = {
        "model_type": "detr",
        "architectures": [ARCHITECTURE],
        "num_channels": 3,
        "num_queries": config.num_queries,
        "position_embedding_type": "sine",
        "auxiliary_loss": False,
        "activation_function": write_activation(config.decoder.activation),
        **{theirs: getattr(config.decoder, ours) for theirs, ours, _ in _SHARED},
    }
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        hf |= {f"{side}_{theirs}": getattr(stack, ours) for theirs, ours, _ in _SIDES}
        hf[f"{side}_ffn_dim"] = round(stack.embed_dim * stack.mlp_ratio)
    return hf


def _hf_backbone(config: DETRConfig, maps: int) -> dict[str, Any]:
    """The fields of config.json for a backbone that has so many feature maps.

    Of the old fields, which all versions read, follows a backbone that gives its second to fifth.
    """
    if maps == 5:
        names = {"use_timm_backbone": True, "use_pretrained_backbone": False, "backbone": config.backbone}
        return {**names, "dilation": config.dilation}
    return {
        "backbone_config": {
            "model_type": "timm_backbone",
            "backbone": config.backbone,
            "features_only": True,
            "out_indices": [maps - 1],
            "output_stride": 16 if config.dilation else None,
        }
    }


def _preprocessor(preprocess: Mapping[str, Any]) -> dict[str, Any]:
    ids = preprocess.get("category_ids")
    return {
        "image_processor_type": "DetrImageProcessor",
        "format": "coco_detection",
        "size": {edge: preprocess[edge] for edge in ("shortest_edge", "longest_edge")},
        "do_pad": True,
        **write_pixels(preprocess),
        **({} if ids is None else {"category_ids": list(ids)}),
    }
