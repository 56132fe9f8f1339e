"""Detections drawn on their image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.detr.draw import LEGIBLE, Detection, Pictures, class_color, draw


def _grey(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (128, 128, 128))


def _colored(picture: Image.Image, label: int) -> np.ndarray:
    """Rows and columns [n, 2] of the pixels in a class's colour."""
    return np.argwhere((np.asarray(picture) == class_color(label)).all(2))


def test_the_box_lies_where_the_object_is() -> None:
    image = _grey(700, 900)
    picture = draw(image, [Detection(0, "cat", 0.9, (100, 200, 300, 400))])
    pixels = _colored(picture, 0)
    assert picture.size == image.size
    assert (pixels.max(0) == (400, 300)).all()
    assert pixels[:, 1].min() == 100
    assert 160 < pixels[:, 0].min() < 200, "the label stands above the box"
    assert (np.asarray(picture)[210:390, 110:290] == 128).all(), "what is in the box is not hidden"
    assert (np.asarray(image) == 128).all(), "the image itself is left alone"


def test_a_name_is_legible_on_its_ground() -> None:
    for label in range(36):
        picture = np.asarray(draw(_grey(700, 700), [Detection(label, "cat", 0.9, (100, 200, 300, 400))]))
        ground, (red, green, blue) = class_color(label), (0.299, 0.587, 0.114)
        brightness = red * ground[0] + green * ground[1] + blue * ground[2]
        text = 0 if (picture[180:200, 100:200] == 0).all(2).any() else 255
        assert abs(text - brightness) > 90


@pytest.mark.parametrize(
    "box", [(-50, -60, 2000, 3000), (690, 690, 900, 900), (-9, -9, -5, -5), (5, 5, 5, 5), (699, 0, 700, 700)]
)
def test_boxes_that_reach_beyond_the_image_are_drawn_in_it(box: tuple[float, float, float, float]) -> None:
    assert len(_colored(draw(_grey(700, 700), [Detection(3, "a name that is long", 1.0, box)]), 3))


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (128, 128), (3000, 20)])
def test_images_of_any_size(size: tuple[int, int]) -> None:
    picture = draw(_grey(*size), [Detection(0, "cat", 0.5, (0, 0, *size))])
    factor = picture.size[0] // size[0]
    assert picture.size == (factor * size[0], factor * size[1])
    assert factor == max(1, LEGIBLE // max(size))
    assert len(_colored(picture, 0))


def test_nothing_found_is_the_image() -> None:
    image = _grey(700, 20)
    assert draw(image, []).tobytes() == image.tobytes()


def test_the_classes_of_a_set_differ_in_colour() -> None:
    assert len({class_color(label) for label in range(91)}) == 91


def test_images_of_one_name_get_pictures_of_their_own(tmp_path: Path) -> None:
    names = ["a/x.png", "b/x.jpg", "c/X.png", "c/x_2.png"]
    pictures = Pictures(str(tmp_path / "out"), names)
    for at, name in enumerate(names):
        pictures.save(name, Image.new("RGB", (at + 1, 1)))
    found = {path.name: Image.open(path).size[0] for path in (tmp_path / "out").iterdir()}
    assert found == {"x.png": 1, "x_2.png": 2, "X_3.png": 3, "x_2_2.png": 4}


def test_a_folder_of_images_to_predict_is_no_place_for_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    with pytest.raises(ValueError, match=r"--draw images: images/x\.png lies there, expected a folder without images"):
        Pictures("images", ["images/x.png"])
    Path("file").touch()
    with pytest.raises(ValueError, match="--draw file: no folder can be made there"):
        Pictures("file", [])
