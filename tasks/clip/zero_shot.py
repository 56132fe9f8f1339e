"""`multimodal zero-shot PHOTO... --labels cat,dog`: name what images show in words that nobody trained for."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from tasks.clip.labels import add_label_arguments, read_labels, shorten, templates_of, warn, warn_of_cut
from tasks.clip.photos import Photo, Photos, add_cache_argument
from tasks.clip.sheet import Sheet
from tasks.errors import UsageError, one_line
from tasks.predict import add_image_arguments, check_output, csv_line, image_paths, positive, predict_images, share

NONE = "none of these"
TOP_K = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_image_arguments(parser, batch_size=32)
    add_label_arguments(parser)
    parser.add_argument("--top-k", type=positive, metavar="K", help=f"labels named for each image (default: {TOP_K})")
    parser.add_argument(
        "--threshold",
        type=share,
        metavar="P",
        help=f"least probability of a label that is named; where no label has it, the answer is {NONE!r}",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true", help="print a JSON object on one line for each image")
    group.add_argument("--csv", action="store_true", help="print a table of path, label and probability")
    parser.add_argument("--sheet", metavar="FILE", help="draw the images with their best label, as PNG, there")
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="measure top-1 and top-5: PATH is one folder with a folder of images for each class, or with test/ or "
        "val/ that is such a folder; labels are the names of the folders, or as many others in the folders' order",
    )
    parser.add_argument(
        "--confusion",
        metavar="FILE",
        help="with --evaluate, where the picture of the confusion matrix goes, as PNG (default: confusion.png)",
    )
    add_cache_argument(parser)


class Answer(NamedTuple):
    """A label of an image."""

    label: str
    probability: float


def run(args: argparse.Namespace) -> int:
    """Predict, or measure; 1 where an image could not be read, which is named while the others are predicted."""
    for name in ("top_k", "threshold", "sheet") if args.evaluate else ("confusion",):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is {'not for' if args.evaluate else 'for'} --evaluate")
    if not args.evaluate:
        return _predict(args)
    from tasks.clip import evaluate  # its libraries take seconds

    return evaluate.run(args)


def _predict(args: argparse.Namespace) -> int:
    try:
        labels = read_labels(args.labels, args.labels_file)
        if labels is None:
            raise ValueError("no labels, expected --labels A,B,… or --labels-file FILE")
        templates = templates_of(args.template)
        paths = image_paths(args.paths)
        check_output("--sheet", args.sheet, paths)
        photos = Photos.load(args)
        features = photos.embedder.labels(labels, templates)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    warn_of_cut(photos.embedder, labels, templates)
    if len(labels) == 1 and photos.embedder.model.logit_bias is None:
        warn(f"{shorten(labels[0])!r} is the only label, so that its probability is 1: name what else there could be")
    sheet = Sheet()

    def predict(read: dict[str, Photo]) -> Iterator[str]:
        probabilities = photos.embedder.probabilities(photos.features(read), features)
        for path, row in zip(read, probabilities, strict=True):
            answers = answers_of(row, labels, args.top_k or TOP_K, args.threshold or 0.0)
            sheet.add(path, [f"{one.label} {one.probability:.0%}" for one in answers[:1]] or [NONE])
            yield _shown(path, answers, args)

    if args.csv:
        print(csv_line("path", "label", "probability"))
    with photos:
        code = predict_images(paths, args.batch_size, photos.read, predict)
    if args.sheet is not None:
        sheet.save(args.sheet)
    return code


def answers_of(probabilities: Tensor, labels: Sequence[str], top_k: int, threshold: float) -> list[Answer]:
    """The best labels of an image, best first; none where none is probable enough.

    Args:
        probabilities: [C].
        labels: their names.
        top_k: how many there are at most.
        threshold: least probability.
    """
    best = probabilities.topk(min(top_k, len(labels)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Answer(labels[index], value) for index, value in pairs if value >= threshold]


def _shown(path: str, answers: Sequence[Answer], args: argparse.Namespace) -> str:
    if args.json:
        predictions = [{"label": one.label, "probability": round(one.probability, 6)} for one in answers]
        return json.dumps({"path": path, "predictions": predictions}, ensure_ascii=False)
    if args.csv:
        rows = [csv_line(path, one.label, f"{one.probability:.6f}") for one in answers]
        return "\n".join(rows or [csv_line(path, NONE, "")])
    rows = [f"  {one.probability:7.2%}  {one.label}" for one in answers]
    return "\n".join([path, *(rows or [f"  {NONE}: no label has a probability of at least {args.threshold:g}"])])
