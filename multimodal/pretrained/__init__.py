"""Weights from anywhere, with what belongs to them: this suite's own files, and those that others publish."""

from multimodal.pretrained.checkpoint import save
from multimodal.pretrained.keymap import check_keys
from multimodal.pretrained.record import Checkpoint, Loaded, build_config, load_weights, plain_config
from multimodal.pretrained.sources import FORMATS, SOURCES, Source, load, read

__all__ = [
    "FORMATS",
    "SOURCES",
    "Checkpoint",
    "Loaded",
    "Source",
    "build_config",
    "check_keys",
    "load",
    "load_weights",
    "plain_config",
    "read",
    "save",
]
