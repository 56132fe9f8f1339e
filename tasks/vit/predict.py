"""`multimodal predict vit PATH...`: name what images show."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from multimodal import pretrained
from multimodal.data import ImagePreprocess, eval_transform, list_images, load_image
from tasks.errors import UsageError, one_line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="image files and folders of images; - (or nothing) reads a list of them from standard input",
    )
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help=f"the model: {pretrained.FORMATS}")
    parser.add_argument(
        "--top-k", type=_positive, default=5, metavar="K", help="classes named for each image (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object on one line for each image")
    parser.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="images at a time (default: 32)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, …; auto is an accelerator where there is one")


def run(args: argparse.Namespace) -> int:
    """Predict; 1 where an image could not be read, which is named while the others are predicted."""
    paths = list(_images(args.paths))
    if not paths:
        raise ValueError(f"no image found in {', '.join(args.paths) or 'the list on standard input'}")
    try:
        device = _device(args.device)
        model, preprocess, labels = _load(args.checkpoint)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    model = model.to(device)
    failed = 0
    many = len(paths) > args.batch_size
    with tqdm(total=len(paths), unit=" images", disable=None if many else True) as progress:
        for start in range(0, len(paths), args.batch_size):
            chunk = paths[start : start + args.batch_size]
            images, errors = _read(chunk, preprocess)
            for line in errors:
                progress.write(f"multimodal: error: {line}", file=sys.stderr)
            if images:
                probabilities = _predict(model, torch.stack(list(images.values())).to(device))
                for path, row in zip(images, probabilities, strict=True):
                    progress.write(_shown(path, row, labels, args.top_k, as_json=args.json), file=sys.stdout)
            failed += len(errors)
            progress.update(len(chunk))
    return int(failed > 0)


def _load(source: str) -> tuple[nn.Module, ImagePreprocess, list[str]]:
    loaded = pretrained.load(source, task="vit")
    classes = loaded.config["num_classes"]
    if loaded.preprocess is None or not classes:
        lacks = "a head" if loaded.preprocess else "how its images were preprocessed"
        raise ValueError(f"{source}: lacks {lacks}, which prediction needs")
    return loaded.model, ImagePreprocess.from_dict(loaded.preprocess), loaded.labels or list(map(str, range(classes)))


def _images(given: Sequence[str]) -> Iterator[str]:
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


def _read(paths: Sequence[str], preprocess: ImagePreprocess) -> tuple[dict[str, Tensor], list[str]]:
    """Images [C, H, W] by path, and a line for each that cannot be read."""
    transform = eval_transform(preprocess)
    images, errors = {}, []
    for path in paths:
        try:
            images[path] = transform(load_image(path, preprocess.channels))
        except ValueError as error:
            errors.append(str(error) if path in str(error) else f"{path}: {error}")
    return images, errors


@torch.inference_mode()
def _predict(model: nn.Module, images: Tensor) -> Tensor:
    """Probabilities [B, num_classes] of images [B, C, H, W]."""
    probabilities: Tensor = model(images).float().softmax(dim=-1).cpu()
    return probabilities


def _shown(path: str, probabilities: Tensor, labels: Sequence[str], top_k: int, *, as_json: bool) -> str:
    best = probabilities.topk(min(top_k, len(labels)))
    named = [(labels[index], value) for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    if as_json:
        predictions = [{"label": label, "probability": round(value, 6)} for label, value in named]
        return json.dumps({"path": path, "predictions": predictions}, ensure_ascii=False)
    return "\n".join([path, *(f"  {value:7.2%}  {label}" for label, value in named)])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.cpu()  # what a meta device cannot do
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
