"""OpenAI's Whisper: `.pt` files (`{"dims", "model_state_dict"}`), `openai:NAME`, and modules of openai-whisper."""

from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multimodal.models.whisper import LAYERS, WhisperConfig
from multimodal.pretrained.files import one_line, write_whole
from multimodal.pretrained.keymap import KeyMap, Rule
from multimodal.pretrained.published_whisper import is_multilingual, preprocess, read_tokenizer, require_published
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

WEIGHTS = "model_state_dict"

# ------------------------------------------------------------------------------------------------------- the tables


def rules() -> list[Rule]:
    """OpenAI's names and ours."""
    table = [
        Rule("encoder.conv1.*", "stem.conv1.*"),
        Rule("encoder.conv2.*", "stem.conv2.*"),
        Rule("encoder.positional_embedding", "audio_positions"),
        Rule("encoder.ln_post.*", "encoder.norm.*"),
        Rule("decoder.token_embedding.weight", "embed.weight"),
        Rule("decoder.positional_embedding", "position.weight"),
        Rule("decoder.ln.*", "decoder.norm.*"),
    ]
    for side in ("encoder", "decoder"):
        attentions = {"attn": "self_attn"} | ({"cross_attn": "cross_attn"} if side == "decoder" else {})
        blocks = f"{side}.blocks.*"
        for theirs, ours in attentions.items():
            table += [
                Rule(f"{blocks}.{theirs}.{name}.*", f"{blocks}.{ours}.{name[0]}_proj.*")
                for name in ("query", "key", "value")
            ]
            table.append(Rule(f"{blocks}.{theirs}.out.*", f"{blocks}.{ours}.out_proj.*"))
            table.append(Rule(f"{blocks}.{theirs}_ln.*", f"{blocks}.{ours}_residual.norm.*"))
        table += [Rule(f"{blocks}.mlp.{i}.*", f"{blocks}.mlp.{name}.*") for i, name in ((0, "fc1"), (2, "fc2"))]
        table.append(Rule(f"{blocks}.mlp_ln.*", f"{blocks}.mlp_residual.norm.*"))
    return table


_SIDES = {"audio": "encoder", "text": "decoder"}
# OpenAI's dimensions, and where they are in our config.
_DIMS = {
    "n_mels": "num_mels",
    "n_audio_ctx": "audio_context",
    "n_vocab": "vocab_size",
    "n_text_ctx": "text_context",
}
_STACK_DIMS = {"state": "embed_dim", "head": "num_heads", "layer": "depth"}

# ---------------------------------------------------------------------------------------------------------- reading


def read_wrapped(path: Path, data: Mapping[str, Any]) -> Checkpoint:
    """A `.pt` file. Its tokenizer is the tokenizer.json beside it, or else that of openai-whisper, if installed."""
    dims, state = data["dims"], data.get(WEIGHTS)
    if not isinstance(dims, Mapping) or not isinstance(state, Mapping):
        raise ValueError(f"{path}: expected dims and {WEIGHTS}, as in a .pt file of openai-whisper")
    return _read(dims, state, str(path), path.parent)


def read_published(name: str) -> Checkpoint:
    """`openai:NAME`, downloaded by openai-whisper into its own cache."""
    try:
        import whisper
    except ModuleNotFoundError as error:
        raise ValueError(f"openai:{name} needs openai-whisper: pip install openai-whisper") from error
    if name not in whisper.available_models():
        raise ValueError(f"openai:{name}: expected one of {', '.join(whisper.available_models())}")
    try:
        return read_module(whisper.load_model(name, device="cpu"))
    except (OSError, RuntimeError) as error:  # no network; a download that is not what was promised
        raise ValueError(f"openai:{name}: {one_line(error)}") from error


def read_module(module: nn.Module) -> Checkpoint:
    """A module of openai-whisper in memory."""
    heads = [[int(layer), int(head)] for layer, head in module.alignment_heads.indices().T]  # type: ignore[operator]
    return _read(asdict(module.dims), module.state_dict(), "a module of openai-whisper", None, heads)  # type: ignore[call-overload]


def _read(
    dims: Mapping[str, Any],
    state: Mapping[str, Tensor],
    where: str,
    folder: Path | None,
    heads: list[list[int]] | None = None,
) -> Checkpoint:
    expected = {*_DIMS, *(f"n_{side}_{name}" for side in _SIDES for name in _STACK_DIMS)}
    if dims.keys() != expected or not all(type(value) is int for value in dims.values()):
        raise ValueError(f"{where}: dims {dict(dims)!r:.200}, expected whole numbers {', '.join(sorted(expected))}")
    values: dict[str, Any] = {ours: dims[theirs] for theirs, ours in _DIMS.items()}
    for theirs, side in _SIDES.items():
        values[side] = LAYERS | {ours: dims[f"n_{theirs}_{name}"] for name, ours in _STACK_DIMS.items()}
    config: WhisperConfig = build_config("whisper", values | {"alignment_heads": heads}, where)
    weights = KeyMap(rules(), template("whisper", config)).to_ours(state, where)
    tokenizer = _tokenizer(config, folder)
    return Checkpoint("whisper", plain_config(config), preprocess(config.num_mels), None, tokenizer, weights)


def _tokenizer(config: WhisperConfig, folder: Path | None) -> dict[str, Any] | None:
    """The tokenizer.json of the folder, or else a word on which of OpenAI's tables is meant."""
    multilingual = is_multilingual(config.vocab_size)
    found = None if folder is None else read_tokenizer(folder, multilingual=multilingual)
    return found or {"multilingual": multilingual, "num_languages": config.vocab_size - 51765 - multilingual}


# ---------------------------------------------------------------------------------------------------------- writing


def to_openai(checkpoint: Checkpoint, path: Path) -> None:
    """Write a `.pt` file that `whisper.load_model(PATH)` takes.

    Raises:
        ValueError: the model has something that OpenAI's does not have.
    """
    where = "export to openai-whisper"
    config: WhisperConfig = build_config(checkpoint.task, checkpoint.config, where)
    fixed = {"mlp_ratio": 4.0, "activation": "gelu"}
    require_published(config, where, **{f"{s}.{name}": (v,) for s in _SIDES.values() for name, v in fixed.items()})
    dims = {theirs: getattr(config, ours) for theirs, ours in _DIMS.items()}
    for theirs, side in _SIDES.items():
        dims |= {f"n_{theirs}_{name}": getattr(getattr(config, side), ours) for name, ours in _STACK_DIMS.items()}
    state = KeyMap(rules(), template("whisper", config)).to_theirs(checkpoint.state_dict, where)
    buffer = BytesIO()
    torch.save({"dims": dims, WEIGHTS: state}, buffer)
    write_whole(path, buffer.getbuffer())
