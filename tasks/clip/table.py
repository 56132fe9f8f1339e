"""Images with captions: a table of files and captions, as TSV or CSV, beside a folder of images."""

import csv
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from pytorch_lightning.utilities import rank_zero_warn

from multimodal.data import load_image
from tasks.clip.samples import Sample, digest_of, text_id

SPLITS = ("train", "val", "test")
SPLIT_COLUMN = "split"
SUFFIXES = (".tsv", ".csv")
_REST = "\0"
"""Where cells are put that have no column; no column is named so."""
_TOLD = 5
"""Rows that a warning names."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table of captions is read.

    Args:
        path: The table, below root; None = the one .tsv or .csv file that lies there.
        file_column: Name of the column with the image files, as paths from the table's folder.
        caption_columns: Names of the columns with captions, any of which is right. Rows of one file add up.
        files: Pattern of the files to use, such as 'photos/*'; None = all.
        test_on: What test measures on, where the table has no split: captions that are held out, or those of training.
    """

    path: str | None = None
    file_column: str = "file"
    caption_columns: tuple[str, ...] = ("caption",)
    files: str | None = None
    test_on: Literal["unseen", "seen"] = "unseen"

    def __post_init__(self) -> None:
        if not self.caption_columns:
            raise ValueError("data.table.caption_columns is empty, expected the name of at least one column")


@dataclass(frozen=True)
class Record:
    """An image file and its captions, each once."""

    file: str
    name: str
    """As the table has it."""
    captions: tuple[str, ...]


class Files:
    """Images of files with captions, decoded each time."""

    candidates: Sequence[tuple[str, int]] = ()

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        record = self.records[index]
        return Sample(load_image(record.file), record.captions, [text_id(caption) for caption in record.captions])

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(*(f"{record.name}\t{record.captions}" for record in self.records))


def find_table(root: Path, name: str | None) -> Path | None:
    """The table of captions; None where none lies in root, ValueError where it is not clear which."""
    if name is not None:
        if not _stays_below(name):
            raise ValueError(
                f"data.table.path is {name}, which leads out of data root {root}, expected a file below it"
            )
        path = root / name
        if not path.is_file():
            raise ValueError(f"{path}: no such file, expected a table of captions")
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"{path}: ends in {path.suffix or 'nothing'!r}, expected .tsv or .csv")
        return path
    found = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    if len(found) > 1:
        raise ValueError(
            f"data root {root}: {len(found)} tables ({', '.join(path.name for path in found[:_TOLD])}), expected one, "
            "or --data.table.path"
        )
    return found[0] if found else None


def read_table(path: Path, options: TableOptions) -> dict[str, list[Record]]:
    """Images and captions by split; train alone where the table has no column split.

    A .tsv file has no quoting, a .csv file the usual one. Rows without caption, or whose file is missing or lies
    outside of the table's folder, are left out and named in one warning.

    Raises:
        ValueError: no table, no such columns, a split of another name, or no row that is left.
    """
    found: dict[str, dict[str, list[str]]] = {}
    problems: list[str] = []
    rows = 0
    for number, row in _rows(path, options):
        name = row[options.file_column]
        if options.files is not None and not fnmatchcase(name, options.files):
            continue
        rows += 1
        captions = [caption for column in options.caption_columns if (caption := row[column].strip())]
        problem = "more cells than columns" if _REST in row else _problem(path.parent, name, captions)
        if problem:
            problems.append(f"row {number}: {problem}")
            continue
        split = row.get(SPLIT_COLUMN, SPLITS[0])
        if split not in SPLITS:
            raise ValueError(f"{path}: row {number}: {SPLIT_COLUMN} is {split!r}, expected {', '.join(SPLITS)}")
        found.setdefault(split, {}).setdefault(name, []).extend(captions)
    if problems:
        more = f" and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        rank_zero_warn(f"{path}: {len(problems)} of {rows} rows left out: {'; '.join(problems[:_TOLD])}{more}")
    if not found:
        which = f" whose file matches {options.files!r}" if options.files and not rows else ""
        raise ValueError(f"{path}: no row with an image and a caption{which}, expected at least one")
    return {
        split: [Record(os.path.join(path.parent, name), name, tuple(dict.fromkeys(c))) for name, c in files.items()]
        for split, files in found.items()
    }


def _rows(path: Path, options: TableOptions) -> Iterator[tuple[int, dict[str, str]]]:
    """Cells by column, and the number of the line; rows that are too short have empty cells."""
    needed = (options.file_column, *options.caption_columns)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".tsv":
                reader = csv.DictReader(file, restkey=_REST, restval="", delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.DictReader(file, restkey=_REST, restval="")
            columns = reader.fieldnames or []
            if lacking := [name for name in needed if name not in columns]:
                raise ValueError(
                    f"{path}: no column {lacking[0]!r}, it has {', '.join(columns) or 'none'}; expected "
                    "data.table.file_column and data.table.caption_columns among them"
                )
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: {error}, expected a table of text in UTF-8") from None


def _problem(folder: Path, name: str, captions: list[str]) -> str | None:
    if not name:
        return "no file"
    if not _stays_below(name):
        return f"{name} lies outside of {folder}"
    if not os.path.isfile(os.path.join(folder, name)):
        return f"no such file {name}"
    return None if captions else f"no caption of {name}"


def _stays_below(name: str) -> bool:
    path = os.path.normpath(name)
    return not os.path.isabs(path) and path.split(os.sep)[0] != os.pardir


def by_caption(captions: Sequence[str], shares: Sequence[float], seed: int) -> list[list[int]]:
    """What `TaskData.complete` splits with: equal captions stay together, and one's part does not depend on the others.

    So the captions that training has not seen are the same whichever files are used.
    """
    limits = list(accumulate(shares))
    parts: list[list[int]] = [[] for _ in range(len(shares) + 1)]
    for index, caption in enumerate(captions):
        part = bisect_right(limits, text_id(f"{seed}/{caption}") / 2**63)
        parts[(part + 1) % len(parts)].append(index)  # what lies behind the last limit remains
    return parts
