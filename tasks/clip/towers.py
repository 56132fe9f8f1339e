"""Towers that a CLIP starts from: the image tower of a `vit` checkpoint or of another CLIP, a CLIP's text tower."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from multimodal import pretrained
from multimodal.models.clip import CLIP, TextConfig
from multimodal.models.vit import ViTConfig
from multimodal.pretrained import Checkpoint, build_config, load_weights

_HEADS = ("head.", "distilled_head.")
_POSITION = "position.weight"


class Tower(NamedTuple):
    """A tower's weights, and the config that they belong to."""

    source: str
    config: Any
    state: dict[str, Tensor]
    preprocess: dict[str, Any] | None


def read_vision(source: str) -> Tower:
    """The image tower of whatever holds one, without its head.

    Raises:
        ValueError: one line that names the source, what was found and what was expected.
    """
    checkpoint = _read(source, ("vit", "clip"), "model.init_vision")
    if checkpoint.task == "clip":
        config = build_config("clip", checkpoint.config, source).vision
        return Tower(source, config, _part(checkpoint.state_dict, "vision."), checkpoint.preprocess)
    config = build_config("vit", checkpoint.config, source)
    state = {name: value for name, value in checkpoint.state_dict.items() if not name.startswith(_HEADS)}
    return Tower(source, replace(config, num_classes=0), state, checkpoint.preprocess)


def read_text(source: str) -> Tower:
    """The text tower of a CLIP; errors are those of `read_vision`."""
    checkpoint = _read(source, ("clip",), "model.init_text")
    config = build_config("clip", checkpoint.config, source).text
    return Tower(source, config, _part(checkpoint.state_dict, "text."), None)


def adopt_vision(tower: Tower, given: ViTConfig) -> ViTConfig:
    """The tower's config, with the image size and what concerns training alone as they are given."""
    return _adopt(tower.config, given, "image_size")


def adopt_text(tower: Tower, given: TextConfig) -> TextConfig:
    """The tower's config, with the context length and what concerns training alone as they are given."""
    if given.context_length > tower.config.context_length:
        raise ValueError(
            f"model.text.context_length is {given.context_length}, expected at most the {tower.config.context_length} "
            f"of {tower.source}"
        )
    return _adopt(tower.config, given, "context_length")


def fill(clip: CLIP, vision: Tower | None, text: Tower | None) -> None:
    """Load the towers' weights; ValueError that lists the keys which do not fit."""
    if vision is not None:
        state = clip.vision.adapt_state_dict(vision.state, vision.config)
        load_weights(clip.vision, state, f"{vision.source}, for the image tower")
    if text is not None:
        length = clip.config.text.context_length
        state = {name: value[:length] if name == _POSITION else value for name, value in text.state.items()}
        load_weights(clip.text, state, f"{text.source}, for the text tower")


def _adopt(own: Any, given: Any, *names: str) -> Any:
    return replace(own, **{name: getattr(given, name) for name in (*names, *sorted(given.TRAINING_ONLY))})


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _read(source: str, tasks: tuple[str, ...], option: str) -> Checkpoint:
    checkpoint = pretrained.read(source)
    if checkpoint.task not in tasks:
        raise ValueError(
            f"{option} {source}: holds a model of task {checkpoint.task!r}, expected {' or '.join(map(repr, tasks))}"
        )
    return checkpoint
