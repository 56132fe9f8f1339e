"""Embeddings on disk, so that a label or a photo is embedded once for each model.

A file is written whole or not at all and says its own checksum, so that processes may share the folder: what is
damaged, or dropped while it is read, counts as not there and is made anew.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor

from multimodal.pretrained.files import one_line, read_safetensors, write_safetensors

VERSION = 1
"""Part of every key; to be raised when the same model and input get other embeddings."""
LIMIT = 4 * 2**30
"""Bytes of all files, beyond which those are dropped that nobody used for longest."""


class Kept(NamedTuple):
    """What a file holds."""

    embeddings: Tensor
    """float32 [n, E]."""
    table: Any
    """Plain data about the rows."""


def default_folder() -> Path:
    """Where the system's user keeps what can be made anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multimodal" / "clip"


class Cache:
    """A folder of embeddings. Where it cannot be written, that is told once and nothing is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told = False

    def read(self, *key: Any) -> Kept | None:
        """What was written under this key; None where there is nothing, or nothing whole."""
        path = self._path(key)
        try:
            tensors, metadata = read_safetensors(path)
            embeddings, table = tensors["embeddings"], metadata["table"]
            if metadata["checksum"] != _checksum(embeddings, table):
                return None
            with suppress(OSError):
                os.utime(path)
            return Kept(embeddings, json.loads(table))
        except (OSError, ValueError, KeyError):
            return None

    def write(self, embeddings: Tensor, table: Any, *key: Any) -> None:
        """Keep embeddings [n, E], and plain data about them, under a key of plain data."""
        text = json.dumps(table)
        metadata = {"table": text, "checksum": _checksum(embeddings, text)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(self._path(key), {"embeddings": embeddings}, metadata)
            self._trim()
        except OSError as error:
            self._tell(error)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Between reading a file and writing it, so that no other process's rows are lost."""
        lock = FileLock(self.folder / ".lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            self._tell(error)
        try:
            yield
        finally:
            lock.release()

    def _path(self, key: Any) -> Path:
        name = hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()
        return self.folder / f"{name}.safetensors"

    def _trim(self) -> None:
        found = []
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process was faster
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > LIMIT:
                path.unlink(missing_ok=True)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            print(f"multimodal: warning: embeddings are not kept in {self.folder}: {one_line(error)}", file=sys.stderr)
        self._told = True


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's values as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _checksum(embeddings: Tensor, table: str) -> str:
    digest = hashlib.sha256(tensor_bytes(embeddings))
    digest.update(table.encode())
    return digest.hexdigest()
