"""What the tasks share that predict from images: their arguments, and how a bad image leaves the others alone."""

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from multimodal import pretrained
from multimodal.data import list_images

T = TypeVar("T")


def add_image_arguments(parser: argparse.ArgumentParser, batch_size: int) -> None:
    """The images, the checkpoint, --batch-size and --device."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="image files and folders of images; - (or nothing) reads a list of them from standard input",
    )
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help=f"the model: {pretrained.FORMATS}")
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=batch_size,
        metavar="N",
        help=f"images at a time (default: {batch_size})",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, …; auto is an accelerator where there is one")


def positive(text: str) -> int:
    """The type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """The type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def check_output(flag: str, place: str | None, inputs: Sequence[str] = ()) -> None:
    """ValueError where a file cannot be written, or is one of the inputs: told before anything is predicted."""
    if place is None:
        return
    if not Path(place).parent.is_dir():
        raise ValueError(f"{flag} {place}: no such folder, expected a file in one that there is")
    if Path(place).is_dir():
        raise ValueError(f"{flag} {place}: a folder, expected a file")
    if Path(place).exists() and any(Path(path).resolve() == Path(place).resolve() for path in inputs):
        raise ValueError(f"{flag} {place}: is read by this command, expected another file")


def image_paths(given: Sequence[str]) -> list[str]:
    """The images that files, folders and - for standard input stand for, each once; ValueError where there is none."""
    paths = list(dict.fromkeys(_listed(given)))
    if not paths:
        raise ValueError(f"no image found in {', '.join(given) or 'the list on standard input'}")
    return paths


def _listed(given: Sequence[str]) -> Iterator[str]:
    for path in given or ["-"]:
        for listed in _standard_input() if path == "-" else [path]:
            if Path(listed).is_dir():
                yield from map(str, list_images(listed))
            else:
                yield listed


def _standard_input() -> list[str]:
    if sys.stdin.isatty():
        raise ValueError("no images: give files, folders, or a list of them on standard input")
    return [line.strip() for line in sys.stdin if line.strip()]


def device_of(name: str) -> torch.device:
    """The device of that name, or for auto an accelerator where there is one; ValueError where it cannot be used."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.cpu()  # what a meta device cannot do
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error


def predict_images(
    paths: Sequence[str],
    batch_size: int,
    read: Callable[[str], T],
    predict: Callable[[dict[str, T]], Iterable[str]],
) -> int:
    """Print what is predicted for each image; the exit code, 1 where an image could not be read.

    Args:
        paths: the images.
        batch_size: how many are read and predicted at a time.
        read: an image's file to what the model needs of it; ValueError where that is impossible, which is told while
            the other images are predicted.
        predict: what was read, by path and in the order of `paths`, to what is printed for each.
    """
    failed = 0
    many = len(paths) > batch_size
    with tqdm(total=len(paths), unit=" images", disable=None if many else True) as progress:
        for start in range(0, len(paths), batch_size):
            chunk = paths[start : start + batch_size]
            images: dict[str, T] = {}
            for path in chunk:
                try:
                    images[path] = read(path)
                except ValueError as error:
                    failed += 1
                    told = str(error) if path in str(error) else f"{path}: {error}"
                    progress.write(f"multimodal: error: {told}", file=sys.stderr)
            for shown in predict(images) if images else ():
                progress.write(shown, file=sys.stdout)
            progress.update(len(chunk))
    return int(failed > 0)


def csv_line(*cells: object) -> str:
    """A row of a table; what holds a comma, a quotation mark or a line break is quoted."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
