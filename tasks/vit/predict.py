"""`multimodal predict vit PATH...`: name what images show."""

import argparse
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from multimodal import pretrained
from multimodal.data import ImagePreprocess, eval_transform, load_image
from tasks.errors import UsageError, one_line
from tasks.predict import add_image_arguments, device_of, image_paths, positive, predict_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    add_image_arguments(parser, batch_size=32)
    parser.add_argument(
        "--top-k", type=positive, default=5, metavar="K", help="classes named for each image (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object on one line for each image")


def run(args: argparse.Namespace) -> int:
    """Predict; 1 where an image could not be read, which is named while the others are predicted."""
    paths = image_paths(args.paths)
    try:
        device = device_of(args.device)
        model, preprocess, labels = _load(args.checkpoint)
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    model = model.to(device)
    transform = eval_transform(preprocess)

    def predict(images: dict[str, Tensor]) -> Iterator[str]:
        probabilities = _predict(model, torch.stack(list(images.values())).to(device))
        for path, row in zip(images, probabilities, strict=True):
            yield _shown(path, row, labels, args.top_k, as_json=args.json)

    return predict_images(
        paths, args.batch_size, lambda path: transform(load_image(path, preprocess.channels)), predict
    )


def _load(source: str) -> tuple[nn.Module, ImagePreprocess, list[str]]:
    loaded = pretrained.load(source, task="vit")
    classes = loaded.config["num_classes"]
    if loaded.preprocess is None or not classes:
        lacks = "a head" if loaded.preprocess else "how its images were preprocessed"
        raise ValueError(f"{source}: lacks {lacks}, which prediction needs")
    return loaded.model, ImagePreprocess.from_dict(loaded.preprocess), loaded.labels or list(map(str, range(classes)))


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
