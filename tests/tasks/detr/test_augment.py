"""Augmentation: boxes stay on their objects, flags on their boxes, and every number comes from the key."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data import DetectionPreprocess, seeded
from tasks.detr.augment import SCALES, AugmentDetection, DetectionAugmentation
from tasks.detr.records import Sample
from tests.tasks.detr.drawn import COLORS, extent, rectangles

BOXES = [(4, 6, 40, 30), (50, 8, 90, 20), (100, 40, 118, 78), (8, 50, 30, 70), (60, 60, 80, 79), (40, 36, 52, 44)]
EDGES = DetectionPreprocess(shortest_edge=64, longest_edge=120)


def sample(boxes: list[tuple[int, int, int, int]] | None = None, width: int = 120, height: int = 80) -> Sample:
    boxes = BOXES if boxes is None else boxes
    count = len(boxes)
    return Sample(
        image=rectangles(boxes, width, height),
        image_id=5,
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        labels=np.arange(count),
        crowd=np.arange(count) % 2 == 1,
        area=np.arange(count, dtype=np.float32) * 10,
    )


def augmented(key: int, preprocess: DetectionPreprocess = EDGES, given: Sample | None = None, **options: Any) -> Sample:
    augment = AugmentDetection(preprocess, DetectionAugmentation(**options))
    with seeded(0, key):
        return augment(given or sample())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"horizontal_flip": 1.0},
        {"vertical_flip": 1.0},
        {"horizontal_flip": 0.5, "vertical_flip": 0.5, "scales": SCALES},
        {"scales": (0.3, 1.0, 2.0)},
        {"crop": 1.0},
        {"horizontal_flip": 0.5, "vertical_flip": 0.5, "scales": SCALES, "crop": 0.5},
    ],
)
@pytest.mark.parametrize("edges", [(64, 120), (150, 400), (40, 50)])
def test_boxes_stay_on_their_objects(options: dict[str, Any], edges: tuple[int, int]) -> None:
    """Each rectangle's pixels fill its box and nothing else, and one that is gone has no box."""
    preprocess = DetectionPreprocess(shortest_edge=edges[0], longest_edge=edges[1], interpolation="nearest")
    for key in range(12):
        found = augmented(key, preprocess, **options)
        left = found.labels.tolist()
        for label, color in enumerate(COLORS):
            pixels = extent(found.image, color)
            if label not in left:
                assert pixels is None
                continue
            box = found.boxes[left.index(label)]
            assert -1e-4 <= box[0] < box[2] <= found.image.width + 1e-4
            assert -1e-4 <= box[1] < box[3] <= found.image.height + 1e-4
            if pixels is None:  # a rest thinner than a pixel of the smaller image
                assert min(box[2] - box[0], box[3] - box[1]) < 1
            else:
                np.testing.assert_allclose(pixels, box, atol=1.001)


def test_flags_and_areas_stay_with_their_boxes() -> None:
    dropped = 0
    for key in range(30):
        found = augmented(key, crop=1.0, horizontal_flip=0.5)
        dropped += len(BOXES) - len(found.labels)
        assert found.crowd.tolist() == [label % 2 == 1 for label in found.labels]
        assert found.area.tolist() == [label * 10 for label in found.labels]
        assert (found.image_id, len(found.boxes)) == (5, len(found.labels))
    assert dropped > 10


def test_without_augmentation_it_is_the_resize_of_evaluation() -> None:
    found = augmented(0)
    assert found.image.size == (96, 64)
    np.testing.assert_allclose(found.boxes, np.array(BOXES) * 0.8, atol=1e-5)


def test_scales() -> None:
    """Each of them comes, the longer side keeps to its limit."""
    sizes = {augmented(key, scales=SCALES).image.size for key in range(100)}
    assert {height for _, height in sizes} == {round(64 * scale) for scale in SCALES}
    assert all(abs(width - height * 1.5) <= 1 for width, height in sizes)
    narrow = DetectionPreprocess(shortest_edge=64, longest_edge=80)
    assert max(augmented(key, narrow, scales=SCALES).image.width for key in range(20)) <= 80


def test_crops_are_those_of_the_published_code() -> None:
    """Of an image of 640 x 480: resized to 400, 500 or 600, a part of 384 to 600 by 384 to 600 pixels."""
    preprocess = DetectionPreprocess()
    augment = AugmentDetection(preprocess, DetectionAugmentation(crop=1.0))
    shares = []
    with seeded(0):
        for _ in range(400):
            _, _, rows, columns = augment._place(480, 640)
            shares.append((rows / 480, columns / 640))
    rows, columns = np.array(shares).T
    assert 384 / 600 - 0.01 <= rows.min() < 0.66
    assert rows.max() == 1
    assert 384 / 800 - 0.01 <= columns.min() < 0.5
    assert columns.max() == 1
    assert rows.mean() == pytest.approx((392 / 400 + 442 / 500 + 492 / 600) / 3, abs=0.02)
    assert columns.mean() == pytest.approx((458.5 / 533 + 492 / 666 + 492 / 800) / 3, abs=0.02)


def test_flips_come_as_often_as_asked() -> None:
    flips = [augmented(key, horizontal_flip=0.3).boxes[0, 0] > 48 for key in range(300)]
    assert 0.2 < np.mean(flips) < 0.4


def test_colours_change_and_boxes_do_not() -> None:
    plain, found = augmented(0), augmented(0, color_jitter=0.5)
    assert found.image != plain.image
    np.testing.assert_array_equal(found.boxes, plain.boxes)


def test_a_key_decides_everything() -> None:
    options: dict[str, Any] = {"horizontal_flip": 0.5, "scales": SCALES, "crop": 0.5, "color_jitter": 0.3}
    images = []
    for key in range(10):
        one = augmented(key, **options)
        torch.rand(3)
        other = augmented(key, **options)
        assert one.image == other.image
        np.testing.assert_array_equal(one.boxes, other.boxes)
        images.append(one.image.tobytes())
    assert len(set(images)) == 10


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 3), (5000, 2)])
def test_images_of_any_size(size: tuple[int, int]) -> None:
    width, height = size
    given = sample([(0, 0, width, height)], width, height)
    for key in range(10):
        found = augmented(key, given=given, crop=1.0, scales=SCALES, horizontal_flip=0.5, vertical_flip=0.5)
        np.testing.assert_allclose(found.boxes, [[0, 0, *found.image.size]], rtol=1e-5)


def test_images_without_boxes() -> None:
    found = augmented(1, given=sample([]), crop=1.0, scales=SCALES, horizontal_flip=1.0, vertical_flip=1.0)
    assert (found.boxes.shape, found.boxes.dtype, found.labels.shape) == ((0, 4), np.float32, (0,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizontal_flip": 1.5}, "horizontal_flip is 1.5, expected a number from 0 to 1"),
        ({"crop": -0.1}, "crop is -0.1"),
        ({"scales": ()}, "scales is .*, expected shares of shortest_edge"),
        ({"scales": (0.5, 0.0)}, "scales is"),
        ({"color_jitter": float("nan")}, "color_jitter is nan"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DetectionAugmentation(**options)


def test_options_over_those_of_a_data_set() -> None:
    default = DetectionAugmentation(horizontal_flip=0.5, crop=0.5)
    assert DetectionAugmentation(crop=0.0).over(default) == DetectionAugmentation(horizontal_flip=0.5, crop=0.0)


def test_a_photograph(shared: Path) -> None:
    """What a crop and a flip leave of real pixels is what the same crop and flip leave of them by hand."""
    with Image.open(shared / "data/bccd/images/BloodImage_00000.jpg") as file:
        image = file.convert("RGB")
    given = Sample(
        image,
        0,
        np.array([[260, 177, 491, 376]], np.float32),
        np.zeros(1, np.int64),
        np.zeros(1, np.bool_),
        np.ones(1, np.float32),
    )
    found = augmented(3, DetectionPreprocess(shortest_edge=480, longest_edge=800), given, horizontal_flip=1.0)
    assert found.image == image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    np.testing.assert_allclose(found.boxes, [[640 - 491, 177, 640 - 260, 376]])
