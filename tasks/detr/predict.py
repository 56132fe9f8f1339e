"""`multimodal predict detr PATH...`: find objects in images, and draw them."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from multimodal import pretrained
from multimodal.data import load_image
from multimodal.data.detection import DetectionPreprocess, detection_transform
from multimodal.models.detr import DETR
from multimodal.pretrained.files import read_json, write_whole
from tasks.detr.draw import Detection, Pictures, draw
from tasks.detr.postprocess import Detections, detections
from tasks.errors import UsageError, one_line
from tasks.predict import add_image_arguments, check_output, device_of, image_paths, predict_images, share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_image_arguments(parser, batch_size=8)
    parser.add_argument(
        "--threshold", type=share, default=0.5, metavar="SCORE", help="least score of what is shown (default: 0.5)"
    )
    parser.add_argument("--draw", metavar="FOLDER", help="draw what is found and write the pictures, as PNG, there")
    parser.add_argument("--json", metavar="FILE", help="write what is found as COCO's results")
    parser.add_argument(
        "--annotations",
        metavar="FILE",
        help="COCO annotations that give the image_id of each file_name; without it images count from 0",
    )


class Picture(NamedTuple):
    """An image, and what the model sees of it."""

    image: Image.Image
    pixels: Tensor


class Finder(NamedTuple):
    """A model with all that it needs to find objects in image files."""

    model: DETR
    preprocess: DetectionPreprocess
    labels: Sequence[str]
    threshold: float
    device: torch.device

    @classmethod
    def load(cls, source: str, threshold: float, device: torch.device) -> "Finder":
        """From a checkpoint; ValueError where it does not say how its images were preprocessed."""
        loaded = pretrained.load(source, task="detr")
        if loaded.preprocess is None:
            raise ValueError(f"{source}: lacks how its images were preprocessed, which prediction needs")
        labels = loaded.labels or list(map(str, range(loaded.config["num_classes"])))
        preprocess = DetectionPreprocess.from_dict(loaded.preprocess)
        return cls(loaded.model.to(device), preprocess, labels, threshold, device)  # type: ignore[arg-type]

    def read(self, path: str) -> Picture:
        """ValueError where the file is not a whole image of sane size."""
        image = load_image(path)
        return Picture(image, detection_transform(self.preprocess)(image))

    @torch.inference_mode()
    def find(self, pictures: Sequence[Picture]) -> list[list[Detection]]:
        """What each image shows, the highest score first.

        Images that are equally large once they are resized run together. None is padded, so that what is found in one
        does not depend on the others.
        """
        groups: dict[torch.Size, list[int]] = {}
        for index, picture in enumerate(pictures):
            groups.setdefault(picture.pixels.shape, []).append(index)
        results: list[list[Detection]] = [[] for _ in pictures]
        for members in groups.values():
            output = self.model(torch.stack([pictures[index].pixels for index in members]).to(self.device))
            sizes = torch.tensor([(pictures[index].image.height, pictures[index].image.width) for index in members])
            for index, one in zip(members, detections(output, sizes, scores=self.model.config.scores), strict=True):
                results[index] = self._named(one)
        return results

    def _named(self, found: Detections) -> list[Detection]:
        order = found["scores"].argsort(descending=True, stable=True)
        rows = zip(*(found[name][order].tolist() for name in ("labels", "scores", "boxes")), strict=True)
        return [
            Detection(label, self.labels[label], score, tuple(box))
            for label, score, box in rows
            if score >= self.threshold
        ]


def run(args: argparse.Namespace) -> int:
    """Predict; 1 where an image could not be read, which is named while the others are predicted."""
    paths = image_paths(args.paths)
    try:
        finder = Finder.load(args.checkpoint, args.threshold, device_of(args.device))
        ids = image_ids(paths, args.annotations)
        check_output("--json", args.json, [*paths, *([args.annotations] if args.annotations else [])])
        pictures = Pictures(args.draw, paths) if args.draw is not None else None
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    results: list[dict[str, Any]] = []

    def predict(read: dict[str, Picture]) -> Iterator[str]:
        for (path, picture), found in zip(read.items(), finder.find(list(read.values())), strict=True):
            if pictures is not None:
                pictures.save(path, draw(picture.image, found))
            results.extend(coco_results(path, ids[path], found, finder.preprocess.category_ids))
            yield _shown(path, found, args.threshold)

    code = predict_images(paths, args.batch_size, finder.read, predict)
    if args.json is not None:
        write_whole(Path(args.json), (json.dumps(results, ensure_ascii=False) + "\n").encode())
    return code


def coco_results(
    path: str, image_id: int, found: Sequence[Detection], category_ids: Sequence[int] | None
) -> list[dict[str, Any]]:
    """What was found in an image, in the format of COCO's results, with boxes as x, y, width, height."""
    return [
        {
            "image_id": image_id,
            "file_name": path,
            "category_id": one.label if category_ids is None else category_ids[one.label],
            "category": one.name,
            "bbox": [round(value, 4) for value in (*one.box[:2], one.box[2] - one.box[0], one.box[3] - one.box[1])],
            "score": round(one.score, 8),
        }
        for one in found
    ]


def image_ids(paths: Sequence[str], annotations: str | None) -> dict[str, int]:
    """The id of each image: its position, or that of the longest file_name in the annotations that its path ends in.

    Raises:
        ValueError: the annotations are no COCO file, or they have no such image, or the same one for two paths.
    """
    if annotations is None:
        return {path: position for position, path in enumerate(paths)}
    known = _file_names(annotations)
    ids: dict[str, int] = {}
    owners: dict[int, str] = {}
    for path in paths:
        parts = Path(path).parts
        name = next((end for end in ("/".join(parts[at:]) for at in range(len(parts))) if end in known), None)
        if name is None:
            raise ValueError(f"--annotations {annotations}: has no image {path}, expected its file_name")
        ids[path] = known[name]
        if (other := owners.setdefault(known[name], path)) != path:
            raise ValueError(f"--annotations {annotations}: {other} and {path} both are its image {name}")
    return ids


def _file_names(annotations: str) -> dict[str, int]:
    """Image ids by file_name."""
    images = read_json(Path(annotations)).get("images")
    if not isinstance(images, list):
        raise ValueError(f"--annotations {annotations}: no list of images in it, expected COCO annotations")
    known: dict[str, int] = {}
    for number, image in enumerate(images):
        if not isinstance(image, Mapping) or type(image.get("id")) is not int or not image.get("file_name"):
            raise ValueError(f"--annotations {annotations}: images[{number}] lacks an id or a file_name")
        if known.setdefault(str(image["file_name"]), image["id"]) != image["id"]:
            raise ValueError(f"--annotations {annotations}: two images have the file_name {image['file_name']}")
    return known


def _shown(path: str, found: Sequence[Detection], threshold: float) -> str:
    if not found:
        return f"{path}\n  nothing with a score of at least {threshold:g}"
    width = max(len(one.name) for one in found)
    rows = [
        f"  {one.score:7.2%}  {one.name.ljust(width)}  " + " ".join(f"{value:.1f}" for value in one.box)
        for one in found
    ]
    return "\n".join([path, *rows])
