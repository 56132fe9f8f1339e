"""The labels and templates of a command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from multimodal.pretrained.files import one_line
from tasks.clip.embed import Embedder

TEMPLATE = "a photo of a {}."
"""The published one (section 3.1.4)."""
_SHOWN = 40


def add_label_arguments(parser: argparse.ArgumentParser) -> None:
    """--labels or --labels-file, and --template."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--labels", metavar="A,B,…", help="the labels, between commas; one that holds a comma needs --labels-file"
    )
    group.add_argument("--labels-file", metavar="FILE", help="a text file with one label a line")
    parser.add_argument(
        "--template",
        action="append",
        metavar="TEXT",
        help=f"text with {{}} in place of the label; several are averaged (default: {TEMPLATE!r})",
    )


def read_labels(text: str | None, file: str | None) -> list[str] | None:
    """The labels that --labels or --labels-file names; None where neither is given.

    Raises:
        ValueError: no label, an empty one, or two that are alike to the model, which knows no upper case.
    """
    if text is None and file is None:
        return None
    if file is not None:
        where, labels = f"--labels-file {file}", [line for line in _lines(Path(file)) if line]
    else:
        where, labels = "--labels", [label.strip() for label in (text or "").split(",")]
    if not any(labels):
        raise ValueError(f"{where}: no label, expected at least one")
    seen: dict[str, int] = {}
    for number, label in enumerate(labels, 1):
        if not label:
            raise ValueError(f"{where}: label {number} of {len(labels)} is empty, expected a word between commas")
        first = seen.setdefault(" ".join(label.split()).casefold(), number)
        if first != number:
            raise ValueError(
                f"{where}: labels {first} and {number} are both {shorten(label)!r}, expected each label once"
            )
    return labels


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise ValueError(f"--labels-file {path}: not UTF-8 ({one_line(error)}), expected text") from error
    except OSError as error:
        raise ValueError(f"--labels-file {path}: {error.strerror}, expected a text file") from error


def templates_of(given: Sequence[str] | None) -> list[str]:
    """ValueError where the label has no place in one."""
    for template in given or ():
        if "{}" not in template:
            raise ValueError(f"--template {template!r}: no {{}} in it, expected one in place of the label")
    return list(given or [TEMPLATE])


def warn_of_cut(embedder: Embedder, labels: Sequence[str], templates: Sequence[str]) -> None:
    """Say which labels the model does not read to their end."""
    if cut := embedder.cut_short(labels, templates):
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        warn(
            f"label {shorten(cut[0])!r}{more}: has more than the {embedder.tokenizer.context_length} tokens "
            "that the model reads, the end is left out"
        )


def warn(message: str) -> None:
    """In one line, beside what is printed."""
    print(f"multimodal: warning: {message}", file=sys.stderr)


def shorten(label: str) -> str:
    """As much of a label as a line holds."""
    return label if len(label) <= _SHOWN else label[: _SHOWN - 1] + "…"
