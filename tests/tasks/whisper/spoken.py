"""Recordings that tests make."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import soundfile

RATE = 8000


def write(path: Path, seconds: float = 0.5, rate: int = RATE) -> Path:
    """A file of noise, always the same one for a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(path.name)).standard_normal(max(0, round(seconds * rate)))
    soundfile.write(path, 0.1 * noise, rate)
    return path


def write_table(root: Path, texts: Mapping[str, str], name: str = "t.tsv", **seconds: float) -> Path:
    """A table of files and texts, and the files; by the stem of a file how long it is."""
    for file in texts:
        write(root / file, seconds.get(Path(file).stem, 0.5))
    rows = ["file\ttext", *(f"{file}\t{text}" for file, text in texts.items())]
    (root / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root
