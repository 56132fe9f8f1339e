"""Files in the form of D4RL (Fu et al. 2020): all steps in a row in an .npz or HDF5 file, with the ends marked.

Keys: observations, actions, rewards, terminals (the environment ended the episode), and timeouts (time did).
"""

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
from pytorch_lightning.utilities import rank_zero_warn

from tasks.dt.episodes import Episode, Recorded, checked
from tasks.errors import one_line

SUFFIXES = (".npz", ".hdf5", ".h5")
KEYS = ("observations", "actions", "rewards", "terminals")


def read(root: str, files: list[str] | None) -> Recorded:
    """The episodes of a file, or of the files in a folder: those of the given names, else all.

    Raises:
        ValueError: no such file, one that is damaged or lacks a key, or an episode with wrong numbers, by name.
    """
    return Recorded([episode for path in _paths(Path(root), files) for episode in _episodes(path)])


def _paths(root: Path, files: list[str] | None) -> list[Path]:
    where = f"data root {root}"
    if not root.exists():
        raise ValueError(f"{where}: no such file or folder, expected files of D4RL's form ({', '.join(SUFFIXES)})")
    if root.is_file():
        if files:
            raise ValueError(f"{where}: a file, and data.files names some in a folder; expected one of them")
        found = [root]
    elif files:
        found = [root / name for name in files]
        for name, path in zip(files, found, strict=True):
            if not path.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"data.files: {name} leads out of {root}, expected names of files in it")
            if not path.is_file():
                raise ValueError(f"{where}: no file {name} in it, expected those of data.files")
    else:
        found = sorted(path for path in root.iterdir() if path.suffix in SUFFIXES)
    if wrong := [path for path in found if path.suffix not in SUFFIXES]:
        raise ValueError(
            f"{wrong[0]}: a file ending in {wrong[0].suffix or 'nothing'!r}, expected {', '.join(SUFFIXES)}"
        )
    if not found:
        raise ValueError(f"{where}: no file ending in {', '.join(SUFFIXES)}, expected at least one")
    return found


def _episodes(path: Path) -> Iterator[Episode]:
    data = _arrays(path)
    count = data["rewards"].size
    for name, values in data.items():
        if values.ndim < 1 or len(values) != count:
            raise ValueError(f"{path}: {name} has shape {values.shape}, expected {count} steps as rewards")
    ends = data["terminals"].astype(bool) | data["timeouts"].astype(bool)
    if ends.ndim != 1:
        raise ValueError(f"{path}: terminals and timeouts have {ends.ndim} dimensions, expected one")
    start = 0
    for number, end in enumerate(np.flatnonzero(ends) + 1):
        parts = (data[name][start:end] for name in ("observations", "actions", "rewards"))
        yield checked(f"{path.name} episode {number} (from step {start})", *parts)
        start = int(end)
    if not start:
        raise ValueError(f"{path}: no step ends an episode, expected terminals or timeouts that are true")
    if start < count:
        rank_zero_warn(f"{path}: its last {count - start} steps are left out, since no end of their episode is marked")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: file[name] for name in (*KEYS, "timeouts") if name in file}
        else:
            with h5py.File(path) as file:
                found = {
                    name: file[name][()] for name in (*KEYS, "timeouts") if isinstance(file.get(name), h5py.Dataset)
                }
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, RuntimeError) as error:
        kind = "an .npz file" if path.suffix == ".npz" else "an HDF5 file"
        raise ValueError(f"{path}: damaged, or no file of D4RL's form ({one_line(error)}); expected {kind}") from error
    return {**_with_timeouts(path, found)}


def _with_timeouts(path: Path, found: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    if missing := [name for name in KEYS if name not in found]:
        raise ValueError(f"{path}: no {missing[0]} in it, expected {', '.join(KEYS)} and timeouts")
    return {"timeouts": np.zeros(found["rewards"].size, dtype=bool), **found}
