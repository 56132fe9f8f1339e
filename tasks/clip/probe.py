"""`multimodal probe FOLDER`: what classifiers can read off the frozen image tower.

n images, D width of the image tower
"""

import argparse
import json
import warnings
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from multimodal.data.folder import Samples, class_names, scan
from tasks.clip.photos import Photos, add_cache_argument
from tasks.data import stratified_split
from tasks.errors import UsageError, one_line
from tasks.predict import add_image_arguments, positive

Array = NDArray[np.float32]

STRENGTHS = tuple(10.0**power for power in range(-5, 3))
"""Inverse strengths of the linear probe's weight decay that are tried."""
HELD_OUT = 0.2
"""Share of each class that is held out where there is no split, and to choose that strength by."""
NEIGHBORS, TEMPERATURE = 20, 0.07
"""Of k-NN, as in "Emerging Properties in Self-Supervised Vision Transformers" (Caron et al. 2021), appendix F.1."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_image_arguments(parser, batch_size=32)
    parser.add_argument(
        "--neighbors",
        type=positive,
        default=NEIGHBORS,
        metavar="K",
        help=f"images that k-NN asks (default: {NEIGHBORS})",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_cache_argument(parser)


class Labelled(NamedTuple):
    """Images as classifiers see them."""

    features: Array
    """[n, D]."""
    labels: list[str]
    """The class of each."""


def run(args: argparse.Namespace) -> int:
    """Measure; 1 where an image could not be read, which is named and left out."""
    try:
        train, test = _split(args.paths)
        photos = Photos.load(args, space="image")
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    code, found = photos.of([path for path, _ in (*train, *test)], args.batch_size)
    known, asked = (
        Labelled(
            np.array([found[path].numpy() for path, _ in part if path in found]),
            [name for path, name in part if path in found],
        )
        for part in (train, test)
    )
    if len(set(known.labels)) < 2 or not asked.labels:
        raise ValueError(f"{args.paths[0]}: too few of its images can be read, expected some of 2 classes")
    figures = {
        "train_images": len(known.labels),
        "test_images": len(asked.labels),
        "classes": len(set(known.labels)),
        "linear": linear_probe(known, asked),
        "knn": nearest_neighbors(known, asked, args.neighbors),
    }
    print(json.dumps(figures) if args.json else _shown(figures))
    return code


def _split(paths: list[str]) -> tuple[Samples, Samples]:
    """Images to learn from, and those of test/ or else val/ to measure with, or a fifth of each class."""
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} paths, expected one folder with a folder of images for each class")
    splits = scan(paths[0])
    if "train" not in splits:
        raise ValueError(f"{paths[0]}: no train/ beside {', '.join(splits)}/, expected images to learn from")
    train, test = splits["train"], splits.get("test") or splits.get("val")
    if len(class_names(train)) < 2:
        raise ValueError(f"{paths[0]}: one class, {train[0][1]}, expected at least 2")
    if test is not None:
        return train, test
    kept, held_out = stratified_split([name for _, name in train], [HELD_OUT], seed=0)
    if not held_out:
        raise ValueError(f"{paths[0]}: one image of each class, expected one more to measure with")
    return [train[index] for index in kept], [train[index] for index in held_out]


def linear_probe(known: Labelled, asked: Labelled) -> float:
    """Accuracy of logistic regression on frozen features, its strength chosen on a part of `known` (appendix A.3)."""
    kept, held_out = stratified_split(known.labels, [HELD_OUT], seed=0)
    best = 1.0
    if held_out and len({known.labels[index] for index in kept}) > 1:
        tried = {strength: _fit(_of(known, kept), strength) for strength in STRENGTHS}
        part = _of(known, held_out)
        best = max(tried, key=lambda strength: tried[strength].score(part.features, part.labels))
    return float(_fit(known, best).score(asked.features, asked.labels))


def _fit(known: Labelled, strength: float) -> Pipeline:
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the weakest decays, which are seldom the best
        return classifier.fit(known.features, known.labels)


def _of(labelled: Labelled, indices: list[int]) -> Labelled:
    return Labelled(labelled.features[indices], [labelled.labels[index] for index in indices])


def nearest_neighbors(known: Labelled, asked: Labelled, neighbors: int) -> float:
    """Accuracy of the nearest neighbours' votes, each weighted by exp(cosine similarity / 0.07)."""

    def weight(distance: Array) -> Array:
        return np.exp((1 - distance) / TEMPERATURE)

    count = min(neighbors, len(known.labels))
    classifier = KNeighborsClassifier(count, weights=weight, metric="cosine").fit(known.features, known.labels)
    return float(classifier.score(asked.features, asked.labels))


def _shown(figures: dict[str, float]) -> str:
    return "\n".join(
        (
            "{train_images} images to learn from, {test_images} to measure with, {classes} classes".format(**figures),
            f"linear probe  {figures['linear']:7.2%}",
            f"k-NN          {figures['knn']:7.2%}",
        )
    )
