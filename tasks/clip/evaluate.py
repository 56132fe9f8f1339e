"""`multimodal zero-shot FOLDER --evaluate`: how well classes are known by their names alone.

n images, C classes
"""

import argparse
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from multimodal.data.folder import Samples, class_names, scan
from multimodal.pretrained.files import write_whole
from tasks.clip.labels import read_labels, shorten, templates_of, warn_of_cut
from tasks.clip.metrics import ranks
from tasks.clip.photos import Photos
from tasks.errors import UsageError, one_line
from tasks.predict import check_output, csv_line

CONFUSION = "confusion.png"
NAMED = 60
"""Classes up to which the picture has their names."""
COUNTED = 20
"""Classes up to which it has numbers."""


@dataclass(frozen=True)
class Result:
    """What was measured."""

    classes: list[str]
    """The names of the folders."""
    ranks: Tensor
    """int64 [n]: the rank, from 1, of an image's own class."""
    confusion: Tensor
    """int64 [C, C]: images of the row's class that are taken for the column's."""

    def top(self, k: int, own: Tensor | None = None) -> float | None:
        """The share of images whose class is among the best k; None where that says nothing."""
        found = self.ranks if own is None else self.ranks[own]
        return float((found <= k).double().mean()) if len(self.classes) > k and len(found) else None

    def of_class(self, index: int, truth: Tensor) -> dict[str, Any]:
        """The figures of one class."""
        own = truth == index
        others = self.confusion[index].clone()
        others[index] = 0
        taken_for = self.classes[int(others.argmax())] if others.any() else None
        return {"images": int(own.sum()), "top1": self.top(1, own), "top5": self.top(5, own), "taken_for": taken_for}


def measure(probabilities: Tensor, truth: Tensor, classes: list[str]) -> Result:
    """From probabilities [n, C] and the index of each image's class, int64 [n]."""
    count = len(classes)
    positives = torch.nn.functional.one_hot(truth, count).bool()
    pairs = truth * count + probabilities.argmax(dim=1)
    return Result(classes, ranks(probabilities, positives), pairs.bincount(minlength=count**2).view(count, count))


def run(args: argparse.Namespace) -> int:
    """Measure; 1 where an image could not be read, which is named and left out."""
    try:
        samples = evaluation_images(args.paths)
        classes = class_names(samples)
        labels = read_labels(args.labels, args.labels_file) or [name.replace("_", " ") for name in classes]
        if len(labels) != len(classes):
            raise ValueError(f"{len(labels)} labels, expected one for each of the {len(classes)} folders")
        if len(classes) < 2:
            raise ValueError(f"{args.paths[0]}: one class, {classes[0]}, expected at least 2")
        templates = templates_of(args.template)
        confusion = args.confusion or CONFUSION
        check_output("--confusion", confusion, [path for path, _ in samples])
        photos = Photos.load(args)
        features = photos.embedder.labels(labels, templates)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    warn_of_cut(photos.embedder, labels, templates)
    code, found = photos.of([path for path, _ in samples], args.batch_size)
    if not found:
        raise ValueError(f"{args.paths[0]}: none of its {len(samples)} images can be read")
    truth = torch.tensor([classes.index(name) for path, name in samples if path in found])
    result = measure(photos.embedder.probabilities(torch.stack(list(found.values())), features), truth, classes)
    draw_confusion(result, Path(confusion))
    print(_shown(result, truth, dict(zip(classes, labels, strict=True)), args))
    if not (args.json or args.csv):
        print(f"\nconfusion matrix: {confusion}")
    return code


def evaluation_images(paths: list[str]) -> Samples:
    """The images below a folder, with their classes: of test/ where there is one, else of val/, else all."""
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} paths, expected one folder with a folder of images for each class")
    splits = scan(paths[0])
    return splits.get("test") or splits.get("val") or splits["train"]


def _shown(result: Result, truth: Tensor, labels: Mapping[str, str], args: argparse.Namespace) -> str:
    rows = {name: result.of_class(index, truth) for index, name in enumerate(result.classes)}
    if args.csv:
        lines = [csv_line("class", "label", "images", "top1", "top5", "taken_for")]
        lines += [csv_line(name, labels[name], *(_cell(value) for value in row.values())) for name, row in rows.items()]
        return "\n".join(lines)
    measured = [row["top1"] for row in rows.values() if row["top1"] is not None]
    summary = {
        "images": len(truth),
        "top1": result.top(1),
        "top5": result.top(5),
        "mean_per_class_top1": sum(measured) / len(measured),
    }
    if args.json:
        classes = {name: {"label": labels[name], **row} for name, row in rows.items()}
        whole = {**summary, "per_class": classes, "confusion": result.confusion.tolist()}
        return json.dumps(whole, ensure_ascii=False)
    width = max(map(len, (*map(shorten, rows), "class")))
    lines = [
        f"{len(truth)} images of {len(rows)} classes",
        *(
            f"{name.ljust(width)}  {_percent(summary[key])}"
            for name, key in _FIGURES.items()
            if summary[key] is not None
        ),
        "",
        f"{'class'.ljust(width)}  images    top-1  most often taken for",
    ]
    for name, row in rows.items():
        figures = f"{row['images']:6d}  {_percent(row['top1'])}  {shorten(row['taken_for'] or '-')}"
        lines.append(f"{shorten(name).ljust(width)}  {figures}")
    return "\n".join(lines)


_FIGURES = {"top-1": "top1", "top-5": "top5", "mean": "mean_per_class_top1"}


def _percent(value: float | None) -> str:
    return "    n/a" if value is None else f"{value:7.2%}"


def _cell(value: Any) -> Any:
    return f"{value:.6f}" if isinstance(value, float) else value


def draw_confusion(result: Result, place: Path) -> None:
    """A picture of the matrix, each row by its share, as PNG; whole or not at all."""
    count = len(result.classes)
    shares = result.confusion / result.confusion.sum(dim=1, keepdim=True).clamp(min=1)
    side = min(16.0, 3 + 0.3 * count)
    figure = Figure(figsize=(side, side), layout="constrained")
    axis = figure.subplots()
    shown = axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axis, label="share of the class", shrink=0.8)
    axis.set_xlabel("taken for")
    axis.set_ylabel("class")
    if count <= NAMED:
        # A $ would begin a formula.
        names = [shorten(name).replace("$", r"\$") for name in result.classes]
        axis.set_xticks(range(count), names, rotation=90)
        axis.set_yticks(range(count), names)
    if count <= COUNTED:
        for row, column in result.confusion.nonzero().tolist():
            color = "white" if shares[row, column] > 0.5 else "black"
            number = str(int(result.confusion[row, column]))
            axis.text(column, row, number, ha="center", va="center", color=color, size=7)
    content = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(content, format="png", dpi=120)
    write_whole(place, content.getbuffer())
