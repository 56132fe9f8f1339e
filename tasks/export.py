"""`multimodal export TASK --checkpoint SOURCE --to FORMAT OUT`: a checkpoint in another format.

What is written is opened again and compared with the model before it gets its name; a failed export leaves nothing.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multimodal import pretrained
from multimodal.pretrained import Checkpoint
from multimodal.pretrained.files import one_line
from tasks.console import table
from tasks.errors import UsageError, did_you_mean
from tasks.formats import Model, as_function, build_model, example_of
from tasks.registry import Format, Task

TOLERANCE = 1e-4
"""Largest difference between the outputs of a model and of its export; see `difference`."""
BATCH_SIZES = (1, 3)
"""Those at which an export is compared with its model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    formats = parser.get_default("task").formats
    width = max(len(one.name) for one in formats)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "formats:\n" + "\n".join(f"  {one.name.ljust(width)}  {_described(one)}" for one in formats)
    parser.add_argument("out", metavar="OUT", help="the file or folder to write")
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help=f"the model: {pretrained.FORMATS}")
    parser.add_argument("--to", required=True, metavar="FORMAT", help="one of the formats below")
    parser.add_argument("--overwrite", action="store_true", help="replace an OUT that was exported before")


def run(args: argparse.Namespace) -> int:
    """Export, and say what was written."""
    task: Task = args.task
    out = Path(args.out).expanduser()
    form = _format(task, args.to)
    try:
        _check_name(task, form, args.out)
        _check_place(form, out, overwrite=args.overwrite)
        checkpoint = pretrained.read(args.checkpoint, task=task.name)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    found = export(checkpoint, form, out, overwrite=args.overwrite)
    print(
        table({"task": task.name, "format": form.name, "wrote": out, "bytes": _size(out), "difference": f"{found:.1e}"})
    )
    return 0


def export(checkpoint: Checkpoint, form: Format, out: Path, *, overwrite: bool = False) -> float:
    """Write `out` whole or not at all; the difference between the model and what was written.

    Raises:
        ValueError: one line that says why the format cannot hold the model, or by how much the outputs differ.
    """
    model = as_function(build_model(checkpoint, "export"))
    with _beside(out) as staged:
        form.load(form.write)(checkpoint, staged)
        try:
            found = difference(checkpoint, model, form.load(form.open)(staged))
        except Exception as error:  # as many kinds as there are libraries that open what was written
            raise ValueError(f"--to {form.name}: what was written does not run ({one_line(error)})") from error
        if not found <= TOLERANCE:  # also where it is not a number
            raise ValueError(f"--to {form.name}: outputs differ by {found:.1e}, expected at most {TOLERANCE:.0e}")
        _install(staged, out, overwrite=overwrite)
    return found


def difference(checkpoint: Checkpoint, model: Model, exported: Model) -> float:
    """Largest max|a − b| / max(1, max|b|) over the outputs b of `model`, on random inputs at several batch sizes."""
    found = [0.0]
    for batch_size in BATCH_SIZES:
        inputs = example_of(checkpoint, batch_size).inputs.values()
        for a, b in zip(exported(*inputs), model(*inputs), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise ValueError(f"output {tuple(a.shape)} {a.dtype}, expected {tuple(b.shape)} {b.dtype}")
            found.append(float((a - b).abs().max() / b.abs().max().clamp(min=1)))
    return max(found, key=lambda value: (value != value, value))  # a NaN is the largest


def _described(form: Format) -> str:
    kind = f"OUT{form.suffix}" if form.suffix else "folder"
    return f"{form.help} ({kind})"


def _format(task: Task, name: str) -> Format:
    formats = {one.name: one for one in task.formats}
    if name not in formats:
        raise UsageError(f"--to {name}: unknown format, {did_you_mean(name, formats)}")
    return formats[name]


# ------------------------------------------------------------------------------------------------- where it is written


def _check_name(task: Task, form: Format, out: str) -> None:
    suffixes = {one.suffix for one in task.formats if one.suffix}
    found = Path(out).suffix
    if not Path(out).name or Path(out).name == "..":
        raise ValueError(f"OUT {out!r} is no name, expected that of a {'file' if form.suffix else 'folder'}")
    if form.suffix and (found != form.suffix or out.endswith("/")):
        raise ValueError(f"OUT {out} ends in {found or 'nothing'!r}, expected {form.suffix} for --to {form.name}")
    if not form.suffix and found in suffixes:
        raise ValueError(f"OUT {out} ends in {found!r}, but --to {form.name} writes a folder")


def _check_place(form: Format, out: Path, *, overwrite: bool) -> None:
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: {'a file' if out.parent.exists() else 'no such folder'}, expected a folder")
    if not os.path.lexists(out) or (not form.suffix and out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{out}: exists already; --overwrite replaces what was exported before")
    if out.is_dir() != (form.suffix is None):
        found, wanted = ("a folder", "a file") if out.is_dir() else ("a file", "a folder")
        raise ValueError(f"{out}: {found}, which --to {form.name} does not replace by {wanted}")


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A path of the same name in a folder of its own beside it, which is removed at the end."""
    try:
        stage = Path(tempfile.mkdtemp(prefix=".export-", dir=out.parent))
    except OSError as error:
        raise UsageError(f"{out}: nothing can be written there ({error.strerror})") from error
    try:
        yield stage / out.name
    except OSError as error:
        raise ValueError(f"{out}: not written ({error.strerror or one_line(error)})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _install(staged: Path, out: Path, *, overwrite: bool) -> None:
    """Flush to the disk and rename. A file may have its large weights in a second one beside it."""
    for path in staged.parent.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if staged.is_file():
        for path in sorted(staged.parent.iterdir(), reverse=True):
            path.replace(out.with_name(path.name))
        return
    if overwrite and out.is_dir():
        foreign = {path.name for path in out.iterdir()} - {path.name for path in staged.iterdir()}
        if foreign:
            raise ValueError(
                f"{out}: holds {', '.join(sorted(foreign))}, which this export does not write; not replaced"
            )
        old = out.rename(staged.parent / f"{out.name}.old")
        try:
            staged.replace(out)
        except OSError:
            old.rename(out)
            raise
        return
    staged.replace(out)


def _size(out: Path) -> int:
    beside = out.with_name(f"{out.name}.data")
    paths = list(out.iterdir()) if out.is_dir() else [out, *([beside] if beside.exists() else [])]
    return sum(path.stat().st_size for path in paths)
