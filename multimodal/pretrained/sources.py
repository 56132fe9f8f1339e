"""Where weights come from: the table of foreign sources, and the two functions that take any of them.

A source is one file of this folder (its table of names and its readers) and one line of `SOURCES`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.models import model_classes
from multimodal.pretrained.checkpoint import KEY, read_ckpt, read_export, read_run
from multimodal.pretrained.files import read_json, read_safetensors, read_torch, unwrap
from multimodal.pretrained.record import Checkpoint, Loaded, build_config, load_weights, plain_config

AnySource = str | os.PathLike[str] | nn.Module


@dataclass(frozen=True)
class Source:
    """Where foreign weights come from; what it serves is read by functions of that name in its file."""

    file: str
    """The file of this folder; `read_module`, `read_folder`, `read_published`, `read_file`, `read_wrapped`: those that
    it serves."""
    library: str | None = None
    """Top package of modules in memory; None = it serves files alone."""
    model_type: str | None = None
    """`model_type` in a Hugging Face config.json, and in the config of a transformers module."""
    folder_file: str = "config.json"
    """The JSON file that describes a folder of this source."""
    folder_key: str | None = None
    """A key that only this source's description has."""
    prefix: str | None = None
    """`PREFIX:NAME` is a published name."""
    file_key: tuple[str, ...] = ()
    """How a key of a bare weight file begins, any of these."""
    wrapped: tuple[str, ...] = ()
    """The keys of a PyTorch file that holds more than weights."""

    def reader(self, function: str) -> Any:
        """A function of this source's file, which is imported now."""
        return getattr(import_module(f"{__package__}.{self.file}"), function)

    def takes_module(self, module: nn.Module) -> bool:
        """Whether a module in memory is of this source."""
        kind = getattr(getattr(module, "config", None), "model_type", None)
        return type(module).__module__.split(".")[0] == self.library and kind == self.model_type

    def takes_folder(self, config: Mapping[str, Any]) -> bool:
        """Whether a folder with this description is of this source."""
        if self.folder_key is not None:
            return self.folder_key in config
        return self.model_type is not None and config.get("model_type") == self.model_type


SOURCES = (
    # Its hub's folders describe themselves to other libraries as well, as half of what they are.
    Source(
        "open_clip",
        "open_clip",
        folder_file="open_clip_config.json",
        folder_key="model_cfg",
        prefix="open_clip",
        file_key=("visual.", "module.visual."),
    ),
    Source("timm_vit", "timm", folder_key="architecture", prefix="timm", file_key=("blocks.0.",)),
    Source("hf_vit", "transformers", model_type="vit"),
    Source("hf_clip", "transformers", model_type="clip"),
    Source("hf_detr", "transformers", model_type="detr"),
    Source("fb_detr", file_key=("transformer.encoder.layers.", "detr.transformer.")),
    Source("hf_whisper", "transformers", model_type="whisper"),
    Source("openai_whisper", "whisper", prefix="openai", wrapped=("dims", "model_state_dict")),
    Source("published_dt", "transformers", model_type="decision_transformer", file_key=("embed_timestep.",)),
)
"""Asked in this order."""
DESCRIPTIONS = tuple(dict.fromkeys(source.folder_file for source in SOURCES))
"""The JSON files by one of which a folder says what it is."""

FORMATS = (
    "a run folder, a .ckpt or .safetensors file, a Hugging Face, timm or open_clip folder, a .pth file of timm, "
    "open_clip, OpenAI's CLIP, facebookresearch/detr or kzl/decision-transformer, a .pt file of openai-whisper, or "
    + ", ".join(f"{source.prefix}:NAME" for source in SOURCES if source.prefix)
)
"""What a path or name may be, for help and errors."""


def read(source: AnySource, *, task: str | None = None) -> Checkpoint:
    """Weights under this suite's names, with config, preprocessing and labels; no model is built.

    Args:
        source: a run folder, a `.ckpt` or `.safetensors` file of this suite, a folder of Hugging Face, timm or
            open_clip, a bare file of timm weights named after its model, of open_clip, OpenAI's CLIP or
            facebookresearch/detr, a `.pt` file of openai-whisper, `timm:NAME[.TAG]`, `open_clip:NAME/TAG`,
            `openai:NAME`, or a module of timm, open_clip, transformers or openai-whisper.
        task: refuse what belongs to another task.

    Raises:
        ValueError: one line that names the source, what was found and what was expected.
    """
    checkpoint = _read_module(source) if isinstance(source, nn.Module) else _read_text(os.fspath(source))
    if task is not None and checkpoint.task != task:
        raise ValueError(f"{_name(source)}: holds a model of task {checkpoint.task!r}, expected {task!r}")
    return checkpoint


def load(source: AnySource, *, task: str | None = None, changes: Mapping[str, Any] | None = None) -> Loaded:
    """A model in evaluation mode with published or trained weights, and what belongs to it.

    Args:
        source, task: see `read`.
        changes: fields of the model's config to change, such as `{"image_size": 384}`, at which positions are
            resampled; a change that makes other weights necessary is an error that lists them.

    Raises:
        ValueError: one line that names the source, what was found and what was expected.
    """
    checkpoint = read(source, task=task)
    where = _name(source)
    original = build_config(checkpoint.task, checkpoint.config, where)
    config = build_config(checkpoint.task, {**checkpoint.config, **(changes or {})}, where)
    model: Any = model_classes(checkpoint.task)[0](config)
    state, preprocess = checkpoint.state_dict, checkpoint.preprocess
    if changes and hasattr(model, "adapt_state_dict"):
        state = model.adapt_state_dict(state, original)
    if changes and "image_size" in changes and preprocess:
        preprocess = {**preprocess, "size": list(config.image_hw)}
    load_weights(model, state, where)
    checkpoint = replace(checkpoint, config=plain_config(config), preprocess=preprocess)
    return Loaded(
        model.eval(),
        checkpoint.task,
        checkpoint.config,
        checkpoint.preprocess,
        checkpoint.labels,
        checkpoint.tokenizer,
    )


def _name(source: AnySource) -> str:
    if isinstance(source, nn.Module):
        return f"{type(source).__module__}.{type(source).__name__}"
    return os.fspath(source)


def _read_module(module: nn.Module) -> Checkpoint:
    for source in SOURCES:
        if source.takes_module(module):
            checkpoint: Checkpoint = source.reader("read_module")(module)
            return checkpoint
    raise ValueError(
        f"{_name(module)}: no known source, expected a module of timm, open_clip or openai-whisper, or a ViT, CLIP, "
        "DETR, Whisper or Decision Transformer of transformers"
    )


def _read_text(text: str) -> Checkpoint:
    if not text:
        raise ValueError(f"no source is named, expected {FORMATS}")
    prefix, colon, name = text.partition(":")
    for source in SOURCES:
        if colon and source.prefix == prefix:
            checkpoint: Checkpoint = source.reader("read_published")(name)
            return checkpoint
    path = Path(text).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.is_file():
        return _read_file(path)
    raise ValueError(f"{text}: no such file or folder, expected {FORMATS}")


def _read_folder(folder: Path) -> Checkpoint:
    if (folder / "checkpoints").is_dir():
        return read_run(folder)
    described = {name: read_json(folder / name) for name in DESCRIPTIONS if (folder / name).is_file()}
    if not described:
        raise ValueError(f"{folder}: neither checkpoints/ nor config.json in it, expected {FORMATS}")
    for source in SOURCES:
        if source.folder_file in described and source.takes_folder(described[source.folder_file]):
            checkpoint: Checkpoint = source.reader("read_folder")(folder)
            return checkpoint
    (name, config), *_ = described.items()
    served = [source for source in SOURCES if source.folder_file == name and (source.model_type or source.folder_key)]
    known = ", ".join(source.model_type or f"any with {source.folder_key!r}" for source in served)
    raise ValueError(f"{folder}: {name} has model_type {config.get('model_type')!r}, expected {known}")


def _read_file(path: Path) -> Checkpoint:
    if path.suffix == ".ckpt":
        return read_ckpt(path)
    if path.suffix == ".safetensors":
        state, metadata = read_safetensors(path)
        if KEY in metadata:
            return read_export(path, state, metadata)
    elif path.suffix in (".bin", ".pth", ".pt"):
        data = read_torch(path)
        for source in SOURCES:
            if source.wrapped and isinstance(data, Mapping) and all(key in data for key in source.wrapped):
                wrapped: Checkpoint = source.reader("read_wrapped")(path, data)
                return wrapped
        state = unwrap(path, data)
    else:
        raise ValueError(f"{path}: a file ending in {path.suffix or 'nothing'!r}, expected {FORMATS}")
    for source in SOURCES:
        if any(key.startswith(source.file_key) for key in state):
            checkpoint: Checkpoint = source.reader("read_file")(path, state)
            return checkpoint
    raise ValueError(f"{path}: its keys ({', '.join(sorted(state)[:3])}, …) are of no known source, expected {FORMATS}")
