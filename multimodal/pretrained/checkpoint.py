"""This suite's own files: runs, the `.ckpt` files in them (read without Lightning), and safetensors exports.

All three hold the same record, plain data under the key `multimodal`; see `Checkpoint.record`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from multimodal.pretrained.files import read_torch, write_safetensors
from multimodal.pretrained.record import Checkpoint

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
BEST, LAST, PREVIOUS = "best.ckpt", "last.ckpt", "previous.ckpt"
"""By the main metric, the latest, and the one before that."""
KEY = "multimodal"
_MODEL = "model."
"""Where a training run's module keeps the model."""


def read_run(folder: Path) -> Checkpoint:
    """The best checkpoint of a run folder, else its last."""
    path = best_checkpoint(folder)
    if path is None:
        raise ValueError(f"{folder}: a run without a checkpoint, expected {CHECKPOINTS}/{BEST} or {CHECKPOINTS}/{LAST}")
    return read_ckpt(path)


def best_checkpoint(folder: Path) -> Path | None:
    """best.ckpt; last.ckpt where nothing was validated; None where nothing was saved."""
    candidates = (folder / CHECKPOINTS / name for name in (BEST, LAST, PREVIOUS))
    return next((path for path in candidates if path.is_file()), None)


def read_ckpt(path: Path) -> Checkpoint:
    """A training checkpoint of this suite."""
    data = read_torch(path)
    if not isinstance(data, Mapping) or KEY not in data:
        lightning = isinstance(data, Mapping) and "pytorch-lightning_version" in data
        found = "another project's Lightning checkpoint" if lightning else "a PyTorch file of another kind"
        raise ValueError(f"{path}: {found}, expected one that this suite wrote (it has a {KEY!r} record)")
    state = data.get("state_dict")
    state = state if isinstance(state, Mapping) else {}
    weights = {key.removeprefix(_MODEL): value for key, value in state.items() if key.startswith(_MODEL)}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path}: no weights of a model, expected keys {_MODEL}… in its state_dict")
    return Checkpoint.from_record(data[KEY], weights, str(path))


def read_export(path: Path, state: dict[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
    """A safetensors file of this suite, from its weights and metadata."""
    try:
        record = json.loads(metadata[KEY])
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: its {KEY!r} metadata is not JSON, expected this suite's record") from error
    return Checkpoint.from_record(record, state, str(path))


def save(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a safetensors file that `load` takes; an older file of this name stays whole until the new one is."""
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"{target}: the name ends in {target.suffix or 'nothing'!r}, expected .safetensors")
    write_safetensors(target, checkpoint.state_dict, {KEY: json.dumps(checkpoint.record())})
