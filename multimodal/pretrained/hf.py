"""What folders of Hugging Face have in common, whichever model they hold: labels, activations, pixel values."""

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from multimodal.pretrained.files import write_whole
from multimodal.pretrained.record import Checkpoint

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""HF's activations in this suite's words."""
# PIL's numbers, as preprocessor_config.json has them.
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def read_saved(module: nn.Module, read: Callable[[Path, str], Checkpoint]) -> Checkpoint:
    """A module of transformers, through the folder that it saves, by what reads a folder, whose second argument names
    the source for errors."""
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(folder)  # type: ignore[operator]
        return read(Path(folder), f"transformers {type(module).__name__}")


def read_activation(name: str, field: str, where: str) -> str:
    """This suite's name of an activation that config.json has under `field`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{where}: {field} {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def write_activation(name: str) -> str:
    """The reverse of `read_activation`."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def read_labels(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes in a config.json, in the order of their outputs; `LABEL_0` … where they have none."""
    names = config.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    return [str(names[index]) for index in sorted(names, key=int)]


def named(labels: list[str]) -> list[str] | None:
    """The labels, or None where they are but `LABEL_0` …"""
    return None if labels == [f"LABEL_{i}" for i in range(len(labels))] else labels


def write_labels(labels: Sequence[str] | None, num_classes: int) -> dict[str, Any]:
    """The fields of a config.json that name the classes."""
    labels = labels or [f"LABEL_{i}" for i in range(num_classes)]
    return {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def read_pixels(config: Mapping[str, Any], path: Path, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """What a preprocessor_config.json says of pixel values; mean and std are those that it means by saying nothing."""
    resample, normalize = config.get("resample", 2), config.get("do_normalize", True)
    if resample not in _RESAMPLE:
        raise ValueError(f"{path}: resample {resample!r}, expected one of {', '.join(map(str, _RESAMPLE))}")
    if not config.get("do_rescale", True) or abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError(f"{path}: pixels are not scaled by 1/255, expected do_rescale with that factor")
    return {
        "mean": list(config.get("image_mean", mean)) if normalize else [0.0] * len(mean),
        "std": list(config.get("image_std", std)) if normalize else [1.0] * len(std),
        "interpolation": _RESAMPLE[resample],
    }


def write_pixels(preprocess: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `read_pixels`."""
    return {
        "do_resize": True,
        "resample": next(number for number, name in _RESAMPLE.items() if name == preprocess["interpolation"]),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": preprocess["mean"],
        "image_std": preprocess["std"],
    }


def read_crop(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a preprocessor_config.json says of the size to which an image is brought."""
    cropped = config.get("do_center_crop", False)
    return {
        "crop_pct": _edge(config["crop_size"]) / _edge(config["size"]) if cropped else 1.0,
        "crop_mode": "center" if cropped else "squash",
    }


def _edge(size: int | Mapping[str, int]) -> int:
    return size if isinstance(size, int) else min(size.values())


def write_crop(preprocess: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The reverse of `read_crop`; it says nothing of a crop where there is none."""
    size, crop_pct, squash = preprocess["size"], preprocess["crop_pct"], preprocess["crop_mode"] == "squash"
    if not squash and size[0] != size[1]:
        raise ValueError(f"{where}: crop_mode 'center' at size {size}, expected a square or 'squash'")
    height, width = (math.floor(side / crop_pct) for side in size)
    crop = {"do_center_crop": True, "crop_size": {"height": size[0], "width": size[1]}}
    return {
        "size": {"height": height, "width": width} if squash else {"shortest_edge": height},
        **({} if squash and crop_pct == 1 else crop),
    }


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_whole(path, json.dumps(data, indent=2).encode())
