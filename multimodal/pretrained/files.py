"""Reading weight files without running anything that they hold, and writing them whole or not at all."""

import argparse
import json
import os
import pickle
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

_MAGIC = {b"PK": "zip", b"\x80": "pickle"}


def one_line(error: object, limit: int = 200) -> str:
    """A message that may span lines, as one of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_torch(path: Path) -> Any:
    """What `torch.save` wrote, tensors and plain data only; ValueError naming the file for everything else."""
    check_torch(path)
    try:
        with warnings.catch_warnings():  # about pickles that torch.save does not write, which then are refused
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            warnings.filterwarnings("ignore", message=".*TorchScript archive")
            with torch.serialization.safe_globals([argparse.Namespace]):  # a mere holder of DETR's own options
                return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"wants to run code ({wanted.group(1)})" if wanted else "holds more than tensors and plain data"
        raise ValueError(f"{path}: refused, because it {found}; expected tensors and plain data alone") from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        if "TorchScript" in str(error):
            raise ValueError(
                f"{path}: refused, because it is a TorchScript archive, which holds code; expected the state_dict of "
                "its model, written by torch.save"
            ) from error
        raise _damaged(path, one_line(error)) from error


def check_torch(path: Path) -> None:
    """ValueError where a file is not what `torch.save` wrote, or not all of it; a flipped bit is found as well."""
    with path.open("rb") as file:
        head = file.read(2)
    if not head:
        raise ValueError(f"{path}: the file is empty, expected a PyTorch checkpoint")
    if not any(head.startswith(magic) for magic in _MAGIC):
        raise ValueError(f"{path}: not a PyTorch file, expected a checkpoint written by torch.save")
    if head != b"PK":
        return
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: the file is cut short, expected a whole PyTorch checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()  # torch.load does not look at checksums
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
        raise _damaged(path, one_line(error)) from error
    if wrong:
        raise _damaged(path, f"checksum of {wrong}")


def _damaged(path: Path, how: str) -> ValueError:
    return ValueError(f"{path}: damaged ({how}), expected a whole PyTorch checkpoint")


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata of a safetensors file; ValueError naming the file for everything else."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        found = "the file is empty" if not path.stat().st_size else f"damaged or no safetensors ({one_line(error)})"
        raise ValueError(f"{path}: {found}, expected a whole safetensors file") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a bare file, safetensors or PyTorch; a wrapping under `model` or `state_dict` is taken off."""
    return read_safetensors(path)[0] if path.suffix == ".safetensors" else unwrap(path, read_torch(path))


def unwrap(path: Path, data: Any) -> dict[str, Tensor]:
    """The weights in what a PyTorch file holds; see `read_weights`."""
    for wrapper in ("model", "state_dict"):
        if isinstance(data, Mapping) and isinstance(data.get(wrapper), Mapping):
            data = data[wrapper]
    if not isinstance(data, Mapping) or not data or not all(isinstance(value, Tensor) for value in data.values()):
        raise ValueError(f"{path}: holds no table of named tensors, expected the weights of a model")
    return dict(data)


def read_folder_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder in Hugging Face's layout, whole or in shards."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path, index = folder / name, folder / f"{name}.index.json"
        if path.is_file():
            return read_weights(path)
        if index.is_file():
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            return {key: value for shard in shards for key, value in read_weights(folder / shard).items()}
    raise ValueError(f"{folder}: no weights, expected model.safetensors or pytorch_model.bin")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError naming the file for everything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({one_line(error)})") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a {type(data).__name__}, expected a JSON object")
    return data


@contextmanager
def whole_file(path: Path, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write into that lies aside, and then, flushed to the disk, takes the place of `path`.

    A file of this name is thus the old one or the new one, never half of it.

    Args:
        path: where it belongs.
        keep: where the old file goes; None = it is replaced.

    Raises:
        OSError: it cannot be written, as on a full disk.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            path.replace(keep)
        aside.replace(path)
        _flush_folder(path.parent)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # torch.save hides it behind its own
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from error
        raise
    finally:
        aside.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Bring a new name to the disk, on systems that can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as file:
        file.write(content)


def write_safetensors(path: Path, state: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write weights and metadata, whole or not at all."""
    write_whole(path, save({key: value.contiguous() for key, value in state.items()}, {"format": "pt", **metadata}))
