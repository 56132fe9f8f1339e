"""Tables of files and texts, as TSV, CSV or JSON lines, beside the files that they name."""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytorch_lightning.utilities import rank_zero_warn

SPLITS = ("train", "val", "test")
SPLIT_COLUMN = "split"
REST = "\0"
"""Where cells are put that have no column; no column is named so."""
_TOLD = 5
"""Rows that a warning names."""


def find_table(root: Path, name: str | None, suffixes: Sequence[str], kind: str) -> Path | None:
    """The table; None where none lies in root, ValueError where it is not clear which.

    Args:
        root: folder of the data.
        name: data.table.path; None = the one that lies there.
        suffixes: how its name may end.
        kind: what it is a table of, for errors.
    """
    endings = " or ".join([", ".join(suffixes[:-1]), suffixes[-1]])
    if name is not None:
        if not stays_below(name):
            raise ValueError(
                f"data.table.path is {name}, which leads out of data root {root}, expected a file below it"
            )
        path = root / name
        if not path.is_file():
            raise ValueError(f"{path}: no such file, expected a table of {kind}")
        if path.suffix.lower() not in suffixes:
            raise ValueError(f"{path}: ends in {path.suffix or 'nothing'!r}, expected {endings}")
        return path
    found = sorted(path for path in root.iterdir() if path.suffix.lower() in suffixes and path.is_file())
    if len(found) > 1:
        raise ValueError(
            f"data root {root}: {len(found)} tables ({', '.join(path.name for path in found[:_TOLD])}), expected one, "
            "or --data.table.path"
        )
    return found[0] if found else None


def read_rows(path: Path, needed: Sequence[str], expected: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Cells by column, and the number of the line; cells that are not there are empty, or under `REST` if too many.

    A .tsv file has no quoting, a .csv file the usual one; a .jsonl file has an object a line.

    Args:
        path: the table.
        needed: columns that it must have.
        expected: what is expected to name them, for errors.

    Raises:
        ValueError: it is no text in UTF-8, or no such table.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".jsonl":
                yield from _objects(path, file, needed, expected)
                return
            if path.suffix.lower() == ".tsv":
                reader = csv.DictReader(file, restkey=REST, restval="", delimiter="\t", quoting=csv.QUOTE_NONE)
            else:
                reader = csv.DictReader(file, restkey=REST, restval="")
            columns = reader.fieldnames or []
            if lacking := [name for name in needed if name not in columns]:
                raise ValueError(
                    f"{path}: no column {lacking[0]!r}, it has {', '.join(columns) or 'none'}; expected "
                    f"{expected} among them"
                )
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: {error}, expected a table of text in UTF-8") from None


def _objects(
    path: Path, lines: Iterator[str], needed: Sequence[str], expected: str
) -> Iterator[tuple[int, dict[str, str]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: row {number}: {error}, expected a JSON object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number}: {line.strip()!r:.80}, expected a JSON object")
        if lacking := [name for name in needed if name not in row]:
            raise ValueError(
                f"{path}: row {number}: no {lacking[0]!r}, it has {', '.join(row) or 'none'}; expected {expected} "
                "among them"
            )
        yield number, {name: "" if value is None else str(value) for name, value in row.items()}


def split_of(path: Path, number: int, row: dict[str, str]) -> str:
    """The split of a row, train where the table has no such column; ValueError for one of another name."""
    split = row.get(SPLIT_COLUMN, SPLITS[0])
    if split not in SPLITS:
        raise ValueError(f"{path}: row {number}: {SPLIT_COLUMN} is {split!r}, expected {', '.join(SPLITS)}")
    return split


def problem_of(folder: Path, name: str) -> str | None:
    """What is wrong with the name of a file that should lie below the table's folder."""
    if not name:
        return "no file"
    if not stays_below(name):
        return f"{name} lies outside of {folder}"
    return None if os.path.isfile(os.path.join(folder, name)) else f"no such file {name}"


def stays_below(name: str) -> bool:
    """Whether a path from a folder leads to something below it."""
    path = os.path.normpath(name)
    return not os.path.isabs(path) and path.split(os.sep)[0] != os.pardir


def warn_left_out(where: object, problems: Sequence[str], total: int, kind: str = "rows") -> None:
    """Name what is left out, the first of many, in one line."""
    if problems:
        more = f" and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
        rank_zero_warn(f"{where}: {len(problems)} of {total} {kind} left out: {'; '.join(problems[:_TOLD])}{more}")
