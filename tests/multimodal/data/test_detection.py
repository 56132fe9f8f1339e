"""Preprocessing for detection: sizes, values, the record, what is refused."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional

from multimodal.data import DetectionPreprocess, detection_transform
from multimodal.data.detection import resized_sides


@pytest.mark.parametrize(
    ("image", "edges", "expected"),
    [
        ((480, 640), (800, 1333), (800, 1066)),  # rounded down
        ((640, 480), (800, 1333), (1066, 800)),
        ((500, 500), (800, 1333), (800, 800)),
        ((800, 1000), (800, 1333), (800, 1000)),  # as it is
        ((480, 1000), (800, 1333), (640, 1333)),  # the longer side decides: 639.84, rounded
        ((301, 1000), (800, 1333), (401, 1332)),  # 401.23, rounded before the longer side follows
        ((1000, 300), (800, 1333), (1333, 400)),
        ((1, 1), (128, 128), (128, 128)),
        ((1, 100), (128, 128), (1, 100)),
        ((5000, 1), (128, 128), (5000, 1)),
    ],
)
def test_sides(image: tuple[int, int], edges: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized_sides(*image, *edges) == expected


def test_values_are_those_of_the_published_pipeline() -> None:
    """Resize, to a tensor, normalise, by torchvision's first transforms, which the published code uses."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    found = detection_transform(DetectionPreprocess(shortest_edge=96, longest_edge=160))(Image.fromarray(pixels))
    expected = functional.to_tensor(functional.resize(Image.fromarray(pixels), [96, 128]))
    expected = functional.normalize(expected, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert found.dtype == torch.float32
    assert found.shape == (3, 96, 128)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_record_is_plain_and_reads_back() -> None:
    preprocess = DetectionPreprocess(shortest_edge=64, longest_edge=128, category_ids=(3, 90))
    record = json.loads(json.dumps(preprocess.to_dict()))
    assert record["category_ids"] == [3, 90]
    assert DetectionPreprocess.from_dict(record) == preprocess
    assert DetectionPreprocess.from_dict({}) == DetectionPreprocess()
    assert dataclasses.replace(DetectionPreprocess(), category_ids=None).channels == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shortest_edge": 0}, "shortest_edge 0 and longest_edge 1333: expected pixels above 0"),
        ({"shortest_edge": 900, "longest_edge": 800}, "shortest_edge 900 and longest_edge 800"),
        ({"mean": (0.5,), "std": (0.5,)}, "mean has 1 values: expected 3"),
        ({"std": (0.5, 0.5, 0.0)}, "std"),
        ({"interpolation": "cubic"}, "interpolation 'cubic'"),
        ({"category_ids": (1, 2, 1)}, "category_ids: an id comes twice"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DetectionPreprocess(**options)


def test_a_record_with_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="preprocess record has crop_pct"):
        DetectionPreprocess.from_dict({"crop_pct": 1.0})


def test_a_resize_beyond_all_pixels_is_refused() -> None:
    transform = detection_transform(DetectionPreprocess(shortest_edge=60_000, longest_edge=60_000))
    with pytest.raises(ValueError, match="an image 1 high and 1 wide would be resized to 60000 by 60000 pixels"):
        transform(Image.new("RGB", (1, 1)))
