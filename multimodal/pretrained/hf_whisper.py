"""Hugging Face's Whisper: folders of `WhisperForConditionalGeneration`. Reading and writing needs no transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.models.whisper import LAYERS, WhisperConfig
from multimodal.pretrained.files import one_line, read_folder_weights, read_json, write_safetensors
from multimodal.pretrained.hf import read_activation, read_saved, write_activation, write_json
from multimodal.pretrained.keymap import KeyMap, Rule
from multimodal.pretrained.published_whisper import (
    FFT_SIZE,
    HOP_LENGTH,
    SAMPLE_RATE,
    TOKENIZER,
    is_multilingual,
    preprocess,
    read_tokenizer,
    require_published,
)
from multimodal.pretrained.record import Checkpoint, build_config, plain_config, template

ARCHITECTURE = "WhisperForConditionalGeneration"
_HEAD = "proj_out.weight"
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

# ------------------------------------------------------------------------------------------------------- the tables


def rules() -> list[Rule]:
    """HF's published names and ours."""
    table = [
        Rule("model.encoder.conv1.*", "stem.conv1.*"),
        Rule("model.encoder.conv2.*", "stem.conv2.*"),
        Rule("model.encoder.embed_positions.weight", "audio_positions"),
        Rule("model.decoder.embed_tokens.weight", "embed.weight"),
        Rule("model.decoder.embed_positions.weight", "position.weight"),
    ]
    for side in ("encoder", "decoder"):
        theirs, ours = f"model.{side}.layers.*", f"{side}.blocks.*"
        attentions = {"self_attn": "self_attn"} | ({"encoder_attn": "cross_attn"} if side == "decoder" else {})
        for a, b in attentions.items():
            table.append(Rule(f"{theirs}.{a}.*.*", f"{ours}.{b}.*.*"))
            table.append(Rule(f"{theirs}.{a}_layer_norm.*", f"{ours}.{b}_residual.norm.*"))
        table.append(Rule(f"{theirs}.final_layer_norm.*", f"{ours}.mlp_residual.norm.*"))
        table += [Rule(f"{theirs}.{fc}.*", f"{ours}.mlp.{fc}.*") for fc in ("fc1", "fc2")]
        table.append(Rule(f"model.{side}.layer_norm.*", f"{side}.norm.*"))
    return table


# HF's field, ours, and the value that a config.json without the field means.
_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("num_mel_bins", "num_mels", 80),
    ("max_source_positions", "audio_context", 1500),
    ("max_target_positions", "text_context", 448),
    ("vocab_size", "vocab_size", 51865),
)
# The same of both stacks, and of one side, where HF's names begin with the side.
_SHARED: tuple[tuple[str, str, Any], ...] = (
    ("d_model", "embed_dim", 384),
    ("dropout", "dropout", 0.0),
    ("activation_dropout", "mlp_dropout", 0.0),
    ("attention_dropout", "attention_dropout", 0.0),
)
_SIDES: tuple[tuple[str, str, int], ...] = (("layers", "depth", 4), ("attention_heads", "num_heads", 6))

# ---------------------------------------------------------------------------------------------------------- reading


def read_folder(folder: Path) -> Checkpoint:
    """A folder that `save_pretrained` wrote, or a download from the hub."""
    return _read(folder, str(folder))


def read_module(module: nn.Module) -> Checkpoint:
    """A transformers module in memory."""
    return read_saved(module, _read)


def _read(folder: Path, where: str) -> Checkpoint:
    generation = folder / "generation_config.json"
    try:
        says = read_json(generation) if generation.is_file() else {}
        config = _config(read_json(folder / "config.json"), says.get("alignment_heads"), where)
        _check_preprocessor(folder, config.num_mels)
    except (AttributeError, LookupError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{where}: its JSON files do not describe a Whisper ({one_line(repr(error))})") from error
    state = read_folder_weights(folder)
    state.pop(_HEAD, None)  # the embedding once more
    weights = KeyMap(rules(), template("whisper", config)).to_ours(state, where)
    multilingual = bool(says.get("is_multilingual", is_multilingual(config.vocab_size)))
    tokenizer = read_tokenizer(folder, multilingual=multilingual)
    return Checkpoint("whisper", plain_config(config), preprocess(config.num_mels), None, tokenizer, weights)


def _config(hf: Mapping[str, Any], heads: Any, where: str) -> WhisperConfig:
    architecture = (hf.get("architectures") or [None])[0]
    for name, found, expected in (
        ("architecture", architecture, ARCHITECTURE),
        ("scale_embedding", hf.get("scale_embedding", False), False),
        ("tie_word_embeddings", hf.get("tie_word_embeddings", True), True),
    ):
        if found != expected:
            raise ValueError(f"{where}: {name} {found!r}, expected {expected!r}")
    values: dict[str, Any] = {ours: hf.get(theirs, default) for theirs, ours, default in _FIELDS}
    activation = read_activation(hf.get("activation_function", "gelu"), "activation_function", where)
    for side in ("encoder", "decoder"):
        values[side] = {
            **LAYERS,
            **{ours: hf.get(theirs, default) for theirs, ours, default in _SHARED},
            **{ours: hf.get(f"{side}_{theirs}", default) for theirs, ours, default in _SIDES},
            "mlp_ratio": hf.get(f"{side}_ffn_dim", 1536) / hf.get("d_model", 384),
            "activation": activation,
        }
    config: WhisperConfig = build_config("whisper", values | {"alignment_heads": heads}, where)
    return config


def _check_preprocessor(folder: Path, num_mels: int) -> None:
    """ValueError where preprocessor_config.json has another spectrogram than OpenAI's."""
    path = folder / "preprocessor_config.json"
    hf = read_json(path) if path.is_file() else {}
    for name, expected in (
        ("feature_size", num_mels),
        ("sampling_rate", SAMPLE_RATE),
        ("n_fft", FFT_SIZE),
        ("hop_length", HOP_LENGTH),
    ):
        if hf.get(name, expected) != expected:
            raise ValueError(f"{path}: {name} {hf[name]!r}, expected {expected}")


# ---------------------------------------------------------------------------------------------------------- writing


def to_hf(checkpoint: Checkpoint, folder: Path, generation: Mapping[str, Any] | None = None) -> None:
    """Write a folder that `WhisperForConditionalGeneration.from_pretrained` and CTranslate2's converter take.

    Args:
        checkpoint: the model; its tokenizer.json is written as well, where the record holds one.
        folder: where to.
        generation: what generation_config.json says of tokens.

    Raises:
        ValueError: the model has something that HF's does not have.
    """
    where = "export to HF Whisper"
    config: WhisperConfig = build_config(checkpoint.task, checkpoint.config, where)
    require_published(config, where, **{"decoder.activation": (config.encoder.activation,)})
    state = KeyMap(rules(), template("whisper", config)).to_theirs(checkpoint.state_dict, where)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", state, {})
    tokens: dict[str, Any] = dict.fromkeys(_TOKENS)  # a field that is not there means OpenAI's number
    tokens |= {name: value for name, value in (generation or {}).items() if name.endswith("_token_id")}
    write_json(folder / "config.json", _hf_config(config) | tokens)
    says = {"alignment_heads": [list(pair) for pair in config.aligned], "max_length": config.text_context}
    write_json(folder / "generation_config.json", says | dict(generation or {}))
    write_json(folder / "preprocessor_config.json", _preprocessor(config))
    if isinstance(checkpoint.tokenizer, Mapping) and "tokenizer" in checkpoint.tokenizer:
        write_json(folder / TOKENIZER, checkpoint.tokenizer["tokenizer"])
        names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "WhisperTokenizer", **names})


def _hf_config(config: WhisperConfig) -> dict[str, Any]:
    """config.json but for the tokens; the rates of dropout are the decoder's."""
    hf = {
        "model_type": "whisper",
        "architectures": [ARCHITECTURE],
        "is_encoder_decoder": True,
        "scale_embedding": False,
        "activation_function": write_activation(config.decoder.activation),
        "num_hidden_layers": config.encoder.depth,
        **{theirs: getattr(config, ours) for theirs, ours, _ in _FIELDS},
        **{theirs: getattr(config.decoder, ours) for theirs, ours, _ in _SHARED},
    }
    for side in ("encoder", "decoder"):
        stack = getattr(config, side)
        hf |= {f"{side}_{theirs}": getattr(stack, ours) for theirs, ours, _ in _SIDES}
        hf[f"{side}_ffn_dim"] = round(stack.embed_dim * stack.mlp_ratio)
    return hf


def _preprocessor(config: WhisperConfig) -> dict[str, Any]:
    samples = 2 * config.audio_context * HOP_LENGTH
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config.num_mels,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP_LENGTH,
        "n_fft": FFT_SIZE,
        "chunk_length": samples // SAMPLE_RATE,
        "n_samples": samples,
        "nb_max_frames": samples // HOP_LENGTH,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
