"""Recordings with transcripts on disk: a table, a folder of audio beside texts, LibriSpeech, Speech Commands.

torchaudio knows where the files of the two corpora lie; it decodes none of them.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchaudio.datasets import LIBRISPEECH, SPEECHCOMMANDS

from multimodal.data.audio import duration, list_audio
from tasks.table import REST, SPLITS, find_table, problem_of, read_rows, split_of, warn_left_out
from tasks.whisper.samples import Recording

SUFFIXES = (".tsv", ".csv", ".jsonl")
Found = dict[str, list[Recording]]
"""Recordings by split."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How a table of recordings is read.

    Args:
        path: The table, below root; None = the one .tsv, .csv or .jsonl file that lies there.
        file_column: Name of the column with the audio files, as paths from the table's folder.
        text_column: Name of the column with what they say.
        where: The rows to use, as COLUMN=VALUE; None = all.
        test: The rows to test on, as COLUMN=VALUE, such as those of a speaker who then is not trained on; None = those
            that a column split tells, or else a share of all.
    """

    path: str | None = None
    file_column: str = "file"
    text_column: str = "text"
    where: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        for name in ("where", "test"):
            if (value := getattr(self, name)) is not None and not value.partition("=")[0]:
                raise ValueError(f"data.table.{name} is {value!r}, expected COLUMN=VALUE")


class Limits:
    """Which lengths a recording may have.

    Args:
        least: seconds of a frame.
        most: seconds that the model hears.
    """

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def seconds(self, file: str) -> float:
        """Of a recording; ValueError, without the file's name, for one that cannot be used."""
        try:
            seconds = duration(file)
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{file}: ")) from error
        if seconds < self.least:
            raise ValueError(f"{seconds:g} s, expected at least a frame of {self.least:g} s")
        if seconds > self.most:
            raise ValueError(f"{seconds:.1f} s, expected at most {self.most:g} s (model.audio_context)")
        return seconds


class Collector:
    """Recordings that can be used, by split, and what is wrong with the others."""

    def __init__(self, where: object, limits: Limits, kind: str) -> None:
        self.where = where
        self.limits = limits
        self.kind = kind
        self.found: Found = {}
        self.problems: list[str] = []
        self.total = 0

    def add(self, split: str, file: str, name: str, text: str, *, label: str, problem: str | None = None) -> None:
        """Take a recording, or note under `label` why not."""
        self.total += 1
        if problem is None and not text.strip():
            problem = f"no text of {name}"
        try:
            if problem is not None:
                raise ValueError(problem)
            recording = Recording(file, name, " ".join(text.split()), self.limits.seconds(file))
        except ValueError as error:
            self.problems.append(f"{label}: {error}")
            return
        self.found.setdefault(split, []).append(recording)

    def done(self) -> Found:
        """What was found; those left out are named in one warning. ValueError where nothing is left."""
        if not any(self.found.values()):
            told = f" ({self.problems[0]})" if self.problems else ""
            raise ValueError(f"{self.where}: no recording with its text{told}, expected at least one")
        warn_left_out(self.where, self.problems, self.total, self.kind)
        return self.found


def read_table(root: Path, options: TableOptions, limits: Limits) -> Found:
    """Recordings of a table by split; train alone where nothing tells the split.

    Rows without text, with more cells than columns, of a file that an earlier row has, that is missing, cannot be used
    or lies outside of the table's folder, are left out and named in one warning.

    Raises:
        ValueError: no table, or none of text in UTF-8; no such columns; a split of another name; no row that is left.
    """
    path = find_table(root, options.path, SUFFIXES, "recordings")
    if path is None:
        raise ValueError(f"data root {root}: no table of recordings, expected a .tsv, .csv or .jsonl file in it")
    where, test = _condition(options.where), _condition(options.test)
    needed = (options.file_column, options.text_column, *where, *test)
    collector = Collector(path, limits, "rows")
    rows: dict[str, int] = {}
    for number, row in read_rows(path, needed, "data.table.file_column and data.table.text_column"):
        if REST not in row and not _holds(row, where):
            continue
        name = row[options.file_column]
        problem = "more cells than columns" if REST in row else problem_of(path.parent, name)
        if problem is None and name in rows:
            problem = f"{name} is in row {rows[name]} already"
        rows.setdefault(name, number)
        split = "test" if test and _holds(row, test) else "train" if REST in row else split_of(path, number, row)
        file = os.path.join(path.parent, name)
        collector.add(split, file, name, row[options.text_column], label=f"row {number}", problem=problem)
    return collector.done()


def _condition(text: str | None) -> dict[str, str]:
    column, _, value = (text or "").partition("=")
    return {column: value} if column else {}


def _holds(row: Mapping[str, str], condition: Mapping[str, str]) -> bool:
    return all(row.get(column) == value for column, value in condition.items())


def read_folder(root: Path, limits: Limits) -> Found:
    """Audio files, each beside a text of its name (a.wav, a.txt), below folders train, val and test where there are
    any.
    """
    found = Collector(f"data root {root}", limits, "recordings")
    splits = [split for split in SPLITS if (root / split).is_dir()]
    for split in splits or ["train"]:
        folder = root / split if splits else root
        for path in list_audio(folder):
            name = path.relative_to(root).as_posix()
            text, problem = "", None
            try:
                text = path.with_suffix(".txt").read_text(encoding="utf-8-sig")
            except FileNotFoundError:
                problem = f"no {path.with_suffix('.txt').name} beside it"
            except (OSError, UnicodeDecodeError) as error:
                problem = f"{path.with_suffix('.txt').name}: {error}, expected a text in UTF-8"
            found.add(split, str(path), name, text, label=name, problem=problem)
    return found.done()


def read_librispeech(root: Path, limits: Limits) -> Found:
    """All train-* sets that lie in root/LibriSpeech to train on; dev-clean, or dev-other, and so test-clean."""
    base = root / "LibriSpeech"
    train = sorted(path.name for path in base.glob("train-*") if path.is_dir())
    sets = {"train": train, "val": _first(base, "dev-clean", "dev-other")}
    sets["test"] = _first(base, "test-clean", "test-other")
    return _corpus(
        root,
        {split: [LIBRISPEECH(str(root), url=name) for name in names] for split, names in sets.items()},
        lambda data: Path(data._archive),
        limits,
        "LibriSpeech with folders such as train-clean-100",
    )


def _first(base: Path, *names: str) -> list[str]:
    return [name for name in names if (base / name).is_dir()][:1]


def read_speech_commands(root: Path, limits: Limits) -> Found:
    """Single words, by the lists of its authors of what to validate and to test on."""
    base = root / "SpeechCommands"
    versions = sorted(path.name for path in base.glob("speech_commands_v*") if path.is_dir())[-1:]
    sets = {"train": "training", "val": "validation", "test": "testing"}
    return _corpus(
        root,
        {split: [SPEECHCOMMANDS(str(root), url=v, subset=name) for v in versions] for split, name in sets.items()},
        lambda data: Path(data._archive),
        limits,
        "SpeechCommands/speech_commands_v0.02",
    )


def _corpus(
    root: Path, sets: Mapping[str, Iterable[Any]], base: Callable[[Any], Path], limits: Limits, expected: str
) -> Found:
    found = Collector(f"data root {root}", limits, "recordings")
    for split, parts in sets.items():
        for data in parts:
            for index in range(len(data)):
                try:
                    name, _, text, *_ = data.get_metadata(index)
                except FileNotFoundError as error:  # of LibriSpeech's, a text that is not among those of its folder
                    found.add(split, "", "", "", label=f"recording {index}", problem=str(error))
                    continue
                found.add(split, str(base(data) / name), str(name), str(text), label=str(name))
    if not found.total:
        raise ValueError(f"data root {root}: none of its recordings there, expected {expected} in it")
    return found.done()
