"""Drawn scenes: always the same, what they promise, and captions that say what is to be seen."""

import hashlib
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from multimodal.data.scenes import COLORS, PAIRS, SHAPES, Scene, _cover, describe, draw_scene


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(0, index) for index in range(200)]


def digest(scenes: list[Scene]) -> str:
    """Of everything that scenes hold."""
    parts = [scene.image.tobytes() + repr((scene.boxes, scene.shapes, scene.colors)).encode() for scene in scenes]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def test_scenes_are_the_same_everywhere(scenes: list[Scene]) -> None:
    """If this fails, drawn scenes are others than before, and so are all figures measured on them."""
    assert digest(scenes[:20]) == "b584c6ea489ea8bc"


def test_a_scene_depends_on_seed_and_index_alone(scenes: list[Scene]) -> None:
    assert draw_scene(0, 7) == scenes[7]
    assert len({digest([scene]) for scene in scenes}) == len(scenes)
    assert draw_scene(1, 7).image != scenes[7].image


def test_images_and_numbers_of_objects(scenes: list[Scene]) -> None:
    counts = Counter(len(scene.boxes) for scene in scenes)
    assert {(scene.image.mode, scene.image.size) for scene in scenes} == {("RGB", (128, 128))}
    assert counts[0] == 20
    assert set(counts) == set(range(9))
    assert all(scene.caption == "an empty scene" for scene in scenes if not scene.boxes)
    assert {name for scene in scenes for name in scene.shapes} == set(SHAPES)
    assert {name for scene in scenes for name in scene.colors} == set(COLORS)
    assert (len(SHAPES), len(COLORS)) == (8, 8)


def test_sizes_and_places(scenes: list[Scene]) -> None:
    sides = []
    for scene in scenes:
        areas = []
        for x0, y0, x1, y1 in scene.boxes:
            assert 0 <= x0 < x1 <= 128
            assert 0 <= y0 < y1 <= 128
            sides.append((x1 - x0, y1 - y0))
            areas.append((x1 - x0) * (y1 - y0))
        assert areas == sorted(areas, reverse=True)
        for one, other in combinations(scene.boxes, 2):
            width = min(one[2], other[2]) - max(one[0], other[0])
            height = min(one[3], other[3]) - max(one[1], other[1])
            shared = max(0, width) * max(0, height)
            both = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
            assert shared <= 0.5 * (both - shared)
    longer = np.array([max(pair) for pair in sides])
    assert all(min(pair) >= 8 and 0.75 <= pair[0] / pair[1] <= 4 / 3 for pair in sides)
    assert (longer.min(), longer.max()) == (8, 64)
    assert abs(longer.mean() - 36) < 2


def test_no_object_is_hidden_and_none_touches_one_of_its_colour(scenes: list[Scene]) -> None:
    for scene in scenes:
        seen = np.zeros((len(scene.boxes), 128, 128))
        for at, ((x0, y0, x1, y1), shape) in enumerate(zip(scene.boxes, scene.shapes, strict=True)):
            cover = _cover(shape, x1 - x0, y1 - y0)
            for other in range(at):
                if scene.colors[other] == scene.colors[at]:
                    assert not (seen[other, y0:y1, x0:x1] * cover).any()
            seen[:at, y0:y1, x0:x1] *= 1 - cover
            seen[at, y0:y1, x0:x1] = cover
        for image, (x0, y0, x1, y1), shape in zip(seen, scene.boxes, scene.shapes, strict=True):
            assert image.sum() >= 0.4 * _cover(shape, x1 - x0, y1 - y0).sum()


def test_objects_are_where_their_boxes_say() -> None:
    """In the boxes colours are saturated, elsewhere greyish."""
    for index in range(20):
        scene = draw_scene(5, index)
        pixels = np.asarray(scene.image).astype(int)
        inside = np.zeros((128, 128), bool)
        for x0, y0, x1, y1 in scene.boxes:
            inside[y0:y1, x0:x1] = True
        saturation = pixels.max(2) - pixels.min(2)
        assert saturation[~inside].max(initial=0) < 50
        for (x0, y0, x1, y1), shape in zip(scene.boxes, scene.shapes, strict=True):
            solid = _cover(shape, x1 - x0, y1 - y0) == 1
            assert np.median(saturation[y0:y1, x0:x1][solid]) > 80


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "height"), [(8, 8), (9, 8), (8, 10), (17, 16), (31, 40), (64, 64), (64, 48)])
def test_boxes_are_tight(shape: str, width: int, height: int) -> None:
    cover = _cover(shape, width, height)
    assert cover.shape == (height, width)
    assert cover.min() >= 0
    assert cover.max() == 1
    for edge in (cover[0], cover[-1], cover[:, 0], cover[:, -1]):
        assert edge.max() > 0.1


def test_shapes_are_distinguishable_at_the_least_size() -> None:
    covers = {shape: _cover(shape, 8, 8) for shape in SHAPES}
    for one, other in combinations(SHAPES, 2):
        assert np.abs(covers[one] - covers[other]).sum() > 6, (one, other)


def test_the_area_of_shapes() -> None:
    """Of a large one, as geometry has it: the edges are neither eaten nor blown up."""
    share = {shape: _cover(shape, 60, 48).sum() / (60 * 48) for shape in SHAPES}
    assert share["square"] == 1
    assert share["circle"] == pytest.approx(np.pi / 4, rel=0.01)
    assert share["ring"] == pytest.approx(np.pi / 4 * (1 - 0.54**2), rel=0.01)
    assert share["triangle"] == pytest.approx(0.5, rel=0.01)
    assert share["diamond"] == pytest.approx(0.5, rel=0.01)
    assert share["cross"] == pytest.approx(1 - 0.66**2, rel=0.02)
    assert share["star"] == pytest.approx(1.12257 / (1.902113 * 1.809017), rel=0.02)


def test_captions_say_what_is_to_be_seen(scenes: list[Scene]) -> None:
    numbers = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8}
    for scene in scenes:
        if not scene.boxes:
            continue
        said: Counter[tuple[str, str]] = Counter()
        for part in re.split(", | and ", scene.caption):
            number, color, noun = part.split()
            assert (number == "an") == (color == "orange" and numbers[number] == 1)
            shape = next(name for name in SHAPES if noun in (name, name + ("es" if name == "cross" else "s")))
            assert (noun == shape) == (numbers[number] == 1)
            said[color, shape] += numbers[number]
        assert said == Counter(zip(scene.colors, scene.shapes, strict=True))
        assert scene.caption.count(" and ") == (len(said) > 1)


def test_the_number_of_objects_can_be_chosen() -> None:
    assert {len(draw_scene(3, index, objects=(1, 1)).boxes) for index in range(20)} == {1}
    assert {len(draw_scene(3, index, objects=(2, 3)).boxes) for index in range(20)} == {2, 3}
    assert [len(draw_scene(3, index, objects=(0, 2)).boxes) for index in range(20)].count(0) == 2


@pytest.mark.parametrize("objects", [(-1, 3), (3, 2), (0, 9), (0, 0)])
def test_other_numbers_are_refused(objects: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected least and greatest number, from 0 to 8"):
        draw_scene(0, 0, objects=objects)


def test_what_objects_may_be_can_be_chosen() -> None:
    pairs = [("red", "star"), ("blue", "ring")]
    found = [draw_scene(3, index, pairs=pairs) for index in range(20)]
    assert {pair for scene in found for pair in zip(scene.colors, scene.shapes, strict=True)} == set(pairs)
    assert draw_scene(3, 4, pairs=PAIRS) == draw_scene(3, 4)
    assert describe([("orange", "cross"), ("red", "ring"), ("red", "ring")]) == "an orange cross and two red rings"
