"""The Decision Transformer as others publish it: Hugging Face's folders, and the state dict of the original authors.

Both keep a GPT-2 under the names of its code, of which the word embedding is never used. The original has no table of
positions; Hugging Face's model adds its first row to every token, which here is `token_bias`. A bare state dict does
not show everything: what it leaves open is as published, with one attention head.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.models.decision_transformer import DecisionTransformerConfig
from multimodal.pretrained.files import one_line, read_folder_weights, read_json, write_safetensors, write_whole
from multimodal.pretrained.hf import read_activation, read_saved, write_activation, write_json
from multimodal.pretrained.keymap import KeyMap, Rule, Split, Transpose
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, plain_stack, require, template

HF, ORIGINAL = "encoder", "transformer"
"""What the GPT-2 inside is called."""
POSITIONS = 1024
"""Tokens for which both make room."""
_PREPROCESSOR = "preprocessor_config.json"

# ------------------------------------------------------------------------------------------------------- the tables


def rules(gpt: str) -> list[Rule]:
    """Their names and ours; `gpt` is HF or ORIGINAL."""
    theirs, ours = f"{gpt}.h.*", "encoder.blocks.*"
    projections = tuple(f"{ours}.self_attn.{part}_proj.*" for part in "qkv")
    conv1d = (Transpose(),)
    same = ("embed_timestep", "embed_return", "embed_state", "embed_action", "predict_state", "predict_return")
    return [
        *(Rule(f"{name}.*", f"{name}.*") for name in same),
        Rule("embed_ln.*", "embed_norm.*"),
        Rule("predict_action.0.*", "predict_action.*"),
        Rule(f"{theirs}.ln_1.*", f"{ours}.self_attn_residual.norm.*"),
        Rule(f"{theirs}.attn.c_attn.*", projections, (*conv1d, Split(3))),
        Rule(f"{theirs}.attn.c_proj.*", f"{ours}.self_attn.out_proj.*", conv1d),
        Rule(f"{theirs}.ln_2.*", f"{ours}.mlp_residual.norm.*"),
        Rule(f"{theirs}.mlp.c_fc.*", f"{ours}.mlp.fc1.*", conv1d),
        Rule(f"{theirs}.mlp.c_proj.*", f"{ours}.mlp.fc2.*", conv1d),
        Rule(f"{gpt}.ln_f.*", "encoder.norm.*"),
    ]


# HF's field, ours, and the value that a config.json without the field means.
_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("hidden_size", "embed_dim", 128),
    ("n_layer", "depth", 3),
    ("n_head", "num_heads", 1),
    ("resid_pdrop", "dropout", 0.1),
    ("embd_pdrop", "embed_dropout", 0.1),
    ("attn_pdrop", "attention_dropout", 0.1),
    ("layer_norm_epsilon", "norm_eps", 1e-5),
    ("act_dim", "action_dim", 4),
    ("action_tanh", "action_tanh", True),
    ("max_ep_len", "max_episode_length", 4096),
    # Not fields of HF's, which keeps them all the same.
    ("context_length", "context_length", 20),
    ("discrete_actions", "discrete", False),
)
# What theirs cannot be told, and so has to be as it is there.
_FIXED: dict[str, tuple[Any, ...]] = {
    "returns": (True,),
    "norm_order": ("pre",),
    "final_norm": (True,),
    "layer_scale": (None,),
    "mlp_dropout": (0.0,),
}
_USUAL = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_UNUSED = re.compile(r"\w+\.(wte\.weight|h\.\d+\.attn\.(masked_)?bias)")
"""A word embedding without words; buffers that older versions saved."""

# ---------------------------------------------------------------------------------------------------------- reading


def read_folder(folder: Path) -> Checkpoint:
    """A folder that `save_pretrained` wrote, or a download from the hub."""
    return _read(folder, str(folder))


def read_module(module: nn.Module) -> Checkpoint:
    """A transformers module in memory."""
    return read_saved(module, _read)


def _read(folder: Path, where: str) -> Checkpoint:
    hf = read_json(folder / "config.json")
    for name, usual in _USUAL.items():
        if hf.get(name, usual) != usual:
            raise ValueError(f"{where}: {name} is {hf[name]}, expected {usual}")
    try:
        values = {ours: hf.get(theirs, default) for theirs, ours, default in _FIELDS}
        width = hf.get("n_inner") or 4 * values["embed_dim"]
        values |= {
            "state_shape": [hf.get("state_dim", 17)],
            "mlp_ratio": width / values["embed_dim"],
            "activation": read_activation(hf.get("activation_function", "relu"), "activation_function", where),
        }
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: its config.json describes no model ({one_line(repr(error))})") from error
    preprocess = read_json(folder / _PREPROCESSOR) if (folder / _PREPROCESSOR).is_file() else None
    return _checkpoint(values, read_folder_weights(folder), HF, preprocess, where)


def read_file(path: Path, state: Mapping[str, Tensor]) -> Checkpoint:
    """A state dict of the original authors' code, or of Hugging Face's model without its config.json."""
    gpt = ORIGINAL if any(key.startswith(f"{ORIGINAL}.") for key in state) else HF
    shapes = {
        name: tuple(state[key].shape) if key in state else ()
        for name, key in (
            ("timesteps", "embed_timestep.weight"),
            ("state", "embed_state.weight"),
            ("action", "embed_action.weight"),
            ("hidden", f"{gpt}.h.0.mlp.c_fc.weight"),
        )
    }
    if wrong := [name for name, shape in shapes.items() if len(shape) != 2 or not all(shape)]:
        raise ValueError(
            f"{path}: no weights of a Decision Transformer, whose {wrong[0]} would be embedded by a matrix"
        )
    rows, dim = shapes["timesteps"]
    values = {
        "embed_dim": dim,
        "depth": len({key.split(".")[2] for key in state if key.startswith(f"{gpt}.h.")}),
        "mlp_ratio": shapes["hidden"][1] / dim,
        "state_shape": [shapes["state"][1]],
        "action_dim": shapes["action"][1],
        "max_episode_length": rows,
    }
    warnings.warn(
        f"{path}: the file does not say how many attention heads its model has, nor its activation, whether actions go "
        "through a tanh, and how many steps it sees; they are taken as published: 1, ReLU, yes, 20",
        stacklevel=2,
    )
    return _checkpoint(values, state, gpt, None, str(path))


def _checkpoint(
    values: Mapping[str, Any], state: Mapping[str, Tensor], gpt: str, preprocess: dict[str, Any] | None, where: str
) -> Checkpoint:
    config: DecisionTransformerConfig = build_config("dt", {**values, "auxiliary": True}, where)
    positions = state.get(f"{gpt}.wpe.weight")
    known = {key: value for key, value in state.items() if not _UNUSED.fullmatch(key) and key != f"{gpt}.wpe.weight"}
    weights = KeyMap(rules(gpt), template("dt", config)).to_ours(known, where)
    if positions is not None and bool(positions[0].any()):
        config = replace(config, token_bias=True)
        weights["token_bias"] = positions[0].clone()
    return Checkpoint("dt", plain_config(config), preprocess, None, None, weights)


# ---------------------------------------------------------------------------------------------------------- writing


def to_hf(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a folder that `DecisionTransformerModel.from_pretrained` takes.

    Heads for state and return that the model lacks are zeros there; no action depends on them. States and returns are
    to be normalised as preprocessor_config.json says, which Hugging Face's model does not read.

    Raises:
        ValueError: the model has something that HF's does not have.
    """
    where = "export to HF Decision Transformer"
    config, state = _published(checkpoint, HF, where)
    positions = torch.zeros(max(POSITIONS, 3 * config.context_length), config.embed_dim)
    if config.token_bias:
        positions[0] = checkpoint.state_dict["token_bias"]
    state |= {f"{HF}.wte.weight": torch.zeros(1, config.embed_dim), f"{HF}.wpe.weight": positions}
    hf = {theirs: getattr(config, ours) for theirs, ours, _ in _FIELDS}
    hf |= {
        "model_type": "decision_transformer",
        "architectures": ["DecisionTransformerModel"],
        "state_dim": config.state_shape[0],
        "action_tanh": config.action_tanh and not config.discrete,
        "n_inner": round(config.embed_dim * config.mlp_ratio),
        "n_positions": len(positions),
        "vocab_size": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "activation_function": write_activation(config.activation),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    write_json(folder / "config.json", hf)
    if checkpoint.preprocess is not None:
        write_json(folder / _PREPROCESSOR, checkpoint.preprocess)


def to_original(checkpoint: Checkpoint, path: Path) -> None:
    """Write a state dict that the original authors' `DecisionTransformer` loads; see `to_hf` for missing heads.

    Raises:
        ValueError: the model has something that the original code does not have, or that the file could not tell.
    """
    where = "export to the original Decision Transformer"
    config, state = _published(checkpoint, ORIGINAL, where)
    told: dict[str, tuple[Any, ...]] = {
        "num_heads": (1,),
        "activation": ("relu",),
        "norm_eps": (1e-5,),
        "discrete": (False,),
        "action_tanh": (True,),
        "context_length": (20,),
        "token_bias": (False,),
    }
    require(config, told, where)
    state[f"{ORIGINAL}.wte.weight"] = torch.zeros(1, config.embed_dim)
    causal = torch.ones(POSITIONS, POSITIONS, dtype=torch.uint8).tril()[None, None]
    for layer in range(config.depth):
        attention = f"{ORIGINAL}.h.{layer}.attn"
        state |= {f"{attention}.bias": causal, f"{attention}.masked_bias": torch.tensor(-1e4)}
    content = BytesIO()
    torch.save(state, content)
    write_whole(path, content.getbuffer())


def _published(checkpoint: Checkpoint, gpt: str, where: str) -> tuple[DecisionTransformerConfig, dict[str, Tensor]]:
    """The config, and the weights under their names, with every head that theirs have."""
    config: DecisionTransformerConfig = build_config(checkpoint.task, checkpoint.config, where)
    fixed = plain_stack(config, "", **_FIXED, state_shape=(config.state_shape[:1],))
    require(config, fixed, where)
    ours = template("dt", replace(config, auxiliary=True, token_bias=False))
    heads = {key: torch.zeros(value.shape) for key, value in ours.items() if key.startswith("predict_")}
    state = {key: value for key, value in checkpoint.state_dict.items() if key != "token_bias"}
    return config, KeyMap(rules(gpt), ours).to_theirs(heads | state, where)
