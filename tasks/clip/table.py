"""Images with captions: a table of files and captions, as TSV or CSV, beside a folder of images."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from multimodal.data import load_image
from tasks.clip.samples import Sample, digest_of, text_id
from tasks.table import REST, problem_of, read_rows, split_of, warn_left_out

SUFFIXES = (".tsv", ".csv")


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
    needed = (options.file_column, *options.caption_columns)
    for number, row in read_rows(path, needed, "data.table.file_column and data.table.caption_columns"):
        name = row[options.file_column]
        if options.files is not None and not fnmatchcase(name, options.files):
            continue
        rows += 1
        captions = [caption for column in options.caption_columns if (caption := row[column].strip())]
        problem = "more cells than columns" if REST in row else problem_of(path.parent, name)
        if problem is None and not captions:
            problem = f"no caption of {name}"
        if problem:
            problems.append(f"row {number}: {problem}")
            continue
        found.setdefault(split_of(path, number, row), {}).setdefault(name, []).extend(captions)
    warn_left_out(path, problems, rows)
    if not found:
        which = f" whose file matches {options.files!r}" if options.files and not rows else ""
        raise ValueError(f"{path}: no row with an image and a caption{which}, expected at least one")
    return {
        split: [Record(os.path.join(path.parent, name), name, tuple(dict.fromkeys(c))) for name, c in files.items()]
        for split, files in found.items()
    }


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
