"""Small data sets of detection in files, for tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLORS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255))
"""Of solid rectangles on black."""
WIDTH, HEIGHT = 60, 40


def rectangles(boxes: list[tuple[int, int, int, int]], width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Black, with a solid rectangle of its own colour for each box x0, y0, x1, y1."""
    pixels = np.zeros((height, width, 3), np.uint8)
    for (x0, y0, x1, y1), color in zip(boxes, COLORS, strict=False):
        pixels[y0:y1, x0:x1] = color
    return Image.fromarray(pixels)


def extent(image: Image.Image, color: tuple[int, int, int]) -> tuple[int, int, int, int] | None:
    """x0, y0, x1, y1 around the pixels that are mostly of a colour; None where there are none."""
    pixels = np.asarray(image).astype(int)
    rows, columns = np.nonzero(np.abs(pixels - color).max(2) < 128)
    return None if not len(rows) else (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def coco(
    images: int = 4, *, ids: tuple[int, ...] = (1, 2), names: tuple[str, ...] = ("cat", "dog"), **changes: Any
) -> dict[str, Any]:
    """COCO annotations of images 0.png and so on; the last one has no box, each other one of every category."""
    content: dict[str, Any] = {
        "images": [{"id": at, "file_name": f"{at}.png", "width": WIDTH, "height": HEIGHT} for at in range(images)],
        "annotations": [
            {
                "id": 10 * at + category,
                "image_id": at,
                "category_id": number,
                "bbox": [5 + 20 * category, 4 + at % 20, 16, 12],
            }
            for at in range(images - 1)
            for category, number in enumerate(ids)
        ],
        "categories": [{"id": number, "name": name} for number, name in zip(ids, names, strict=True)],
    }
    return {**content, **changes}


def write_coco(root: Path, content: Any, file: str = "annotations.json", folder: str = "images") -> Path:
    """Annotations and their images; the file of annotations."""
    path = root / file
    for place in (path.parent, root / folder):
        place.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    if isinstance(content, dict):
        for image in content["images"]:
            boxes = [item["bbox"] for item in content["annotations"] if item.get("image_id") == image["id"]]
            corners = [(x, y, x + w, y + h) for x, y, w, h in boxes]
            rectangles(corners).save(root / folder / image["file_name"])
    return path
