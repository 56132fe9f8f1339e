"""COCO annotations: ids, boxes, orientation, the usual places, and files that are broken."""

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.detr.coco import find_coco, read_coco
from tasks.detr.records import Annotations, load, turn
from tests.tasks.detr.drawn import COLORS, HEIGHT, WIDTH, coco, extent, rectangles, write_coco


def read(root: Path, content: Any) -> Annotations:
    return read_coco(write_coco(root, content), root)


def written(root: Path, *boxes: list[Any], **annotation: Any) -> Path:
    """A file about one black image, with an annotation 7, 8, … for each box x, y, width, height."""
    content = coco(1)
    content["annotations"] = [
        {"id": 7 + at, "image_id": 0, "category_id": 1, "bbox": box, **annotation} for at, box in enumerate(boxes)
    ]
    Image.new("RGB", (WIDTH, HEIGHT)).save(root / "0.png")
    path = root / "annotations.json"
    path.write_text(json.dumps(content))
    return path


# -------------------------------------------------------------------------------------------------------- contents


def test_records(tmp_path: Path) -> None:
    found = read(tmp_path, coco())
    assert (found.labels, found.category_ids) == (["cat", "dog"], [1, 2])
    assert [record.image_id for record in found.records] == [0, 1, 2, 3]
    record = found.records[1]
    assert record.file == str(tmp_path / "images/1.png")
    assert record.size == (HEIGHT, WIDTH)
    np.testing.assert_array_equal(record.boxes, [[5, 5, 21, 17], [25, 5, 41, 17]])
    assert record.labels.tolist() == [0, 1]
    assert record.crowd.tolist() == [False, False]
    assert record.area.tolist() == [192, 192]
    assert found.records[3].boxes.shape == (0, 4)
    types = {name: getattr(record, name).dtype.name for name in ("boxes", "labels", "crowd", "area")}
    assert types == {"boxes": "float32", "labels": "int64", "crowd": "bool", "area": "float32"}


@pytest.mark.parametrize("ids", [(1, 2), (0, 1), (3, 90), (90, 3), (-5, 2**40)])
def test_any_category_ids(tmp_path: Path, ids: tuple[int, ...]) -> None:
    """The classes are in the order of the ids, whatever these are and however they are listed."""
    found = read(tmp_path, coco(ids=ids))
    swapped = ids[0] > ids[1]
    assert found.category_ids == sorted(ids)
    assert found.labels == (["dog", "cat"] if swapped else ["cat", "dog"])
    assert found.records[0].labels.tolist() == ([1, 0] if swapped else [0, 1])


def test_a_category_without_boxes_is_a_class(tmp_path: Path) -> None:
    content = coco()
    content["categories"].insert(0, {"id": 0, "name": "animals"})
    found = read(tmp_path, content)
    assert (found.labels, found.records[0].labels.tolist()) == (["animals", "cat", "dog"], [1, 2])


def test_a_category_that_no_box_has_may_be_named_as_another(tmp_path: Path) -> None:
    content = coco()
    content["categories"].insert(0, {"id": 0, "name": "dog"})
    found = read(tmp_path, content)
    assert (found.labels, found.category_ids) == (["cat", "dog"], [1, 2])


def test_crowds_and_areas(tmp_path: Path) -> None:
    content = coco(2)
    content["annotations"][0] |= {"iscrowd": 1, "area": 12.5}
    content["annotations"][1] |= {"iscrowd": 0, "area": float("nan")}
    (record, _) = read(tmp_path, content).records
    assert record.crowd.tolist() == [True, False]
    assert record.area.tolist() == [12.5, 192]


def test_annotations_in_any_order(tmp_path: Path) -> None:
    content = coco()
    expected = read(tmp_path, content).records
    content["annotations"].reverse()
    for one, other in zip(read(tmp_path, content).records, expected, strict=True):
        np.testing.assert_array_equal(one.boxes, other.boxes[::-1])
        np.testing.assert_array_equal(one.labels, other.labels[::-1])


def test_what_is_dropped_and_clipped_is_said_once(tmp_path: Path) -> None:
    """What has no area goes first, so that clipping does not hide it."""
    path = written(
        tmp_path,
        [10, 10, 0, 5],
        [10, 10, 5, -3],
        [float("nan"), 0, 5, 5],
        [0, 0, float("inf"), 5],
        [2, 3, 10**400, 5],
        [WIDTH, 0, 5, 5],
        [-20, 5, 20, 5],
        [-5, 10, 20, 10],
        [50, 30, 20, 20],
        [1, 2, 3, 4],
        [39.9, 20, 20.1000001, 10],
    )
    with pytest.warns(UserWarning, match="annotations.json") as caught:
        (record,) = read_coco(path, tmp_path).records
    np.testing.assert_allclose(record.boxes, [[0, 10, 15, 20], [50, 30, 60, 40], [1, 2, 4, 6], [39.9, 20, 60, 30]])
    (message,) = [str(warning.message) for warning in caught]
    assert message == (
        f"{path}: dropped 5 boxes without area or not finite (annotation 7 of 0.png, annotation 8 of 0.png, "
        "annotation 9 of 0.png, …); dropped 2 boxes outside of their images (annotation 12 of 0.png, annotation 13 of "
        "0.png); clipped 2 boxes that reached out of their images (annotation 14 of 0.png, annotation 15 of 0.png)"
    )


def test_whole_boxes_are_no_news(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(tmp_path, coco())


def test_no_size_in_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, [50, 30, 20, 20])
    content = json.loads(path.read_text())
    del content["images"][0]["width"]
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="clipped 1 box "):
        (record,) = read_coco(path, tmp_path).records
    assert record.boxes.tolist() == [[50, 30, 60, 40]]
    assert record.size is None


def test_ten_thousand_boxes(tmp_path: Path) -> None:
    path = written(tmp_path, *([at % 40, at % 30, 5, 5] for at in range(10_000)))
    start = time.perf_counter()
    (record,) = read_coco(path, tmp_path).records
    assert record.boxes.shape == (10_000, 4)
    assert time.perf_counter() - start < 5


def test_an_image_of_one_pixel(tmp_path: Path) -> None:
    content = coco(1)
    content["images"][0] |= {"width": 1, "height": 1}
    content["annotations"] = [{"id": 1, "image_id": 0, "category_id": 2, "bbox": [0, 0, 1, 1]}]
    write_coco(tmp_path, content)
    Image.new("RGB", (1, 1)).save(tmp_path / "images/0.png")
    (record,) = read_coco(tmp_path / "annotations.json", tmp_path).records
    sample = load(record)
    assert (sample.image.size, sample.boxes.tolist()) == ((1, 1), [[0, 0, 1, 1]])


# ----------------------------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tiff"])
@pytest.mark.parametrize("seen", ["stored", "upright", None])
def test_boxes_are_turned_with_their_image(tmp_path: Path, orientation: int, kind: str, seen: str | None) -> None:
    """Sizes tell on which image the boxes were measured; where they cannot, on the stored one."""
    stored_box, stored = (6, 4, 30, 12), (HEIGHT, WIDTH)
    exif = Image.Exif()
    exif[0x0112] = orientation
    rectangles([stored_box]).save(tmp_path / f"0.{kind}", exif=exif, **({"quality": 95} if kind == "jpg" else {}))
    (upright_box,) = turn(np.array([stored_box], np.float32), stored, orientation).tolist()
    turned = orientation >= 5
    box = upright_box if seen == "upright" and turned else stored_box
    content = coco(1)
    content["images"][0]["file_name"] = f"0.{kind}"
    sizes = {"stored": (WIDTH, HEIGHT), "upright": (HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT), None: (None, None)}
    content["images"][0] |= dict(zip(("width", "height"), sizes[seen], strict=True))
    x0, y0, x1, y1 = box
    content["annotations"] = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [x0, y0, x1 - x0, y1 - y0]}]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(content))
    (record,) = read_coco(path, tmp_path).records
    sample = load(record)
    assert sample.image.size == ((HEIGHT, WIDTH) if turned else (WIDTH, HEIGHT))
    (found,) = sample.boxes
    assert tuple(found) == extent(sample.image, COLORS[0])
    assert tuple(found) == tuple(upright_box)


def test_another_size_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [1, 2, 3, 4])
    Image.new("RGB", (WIDTH + 1, HEIGHT)).save(tmp_path / "0.png")
    (record,) = read_coco(path, tmp_path).records
    with pytest.raises(ValueError, match=r"0.png: 61 × 40 pixels, expected 60 × 40 as its annotations say"):
        load(record)


# ---------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        ({"train": "annotations.json"}, {"train": "images"}),
        ({"train": "annotations.json"}, {"train": "."}),
        (
            {"train": "annotations/instances_train2017.json", "val": "annotations/instances_val2017.json"},
            {"train": "train2017", "val": "val2017"},
        ),
        (
            {"train": "annotations/instances_train.json", "val": "annotations/instances_val.json"},
            {"train": "images/train", "val": "images/val"},
        ),
        (
            {
                "train": "train/_annotations.coco.json",
                "val": "valid/_annotations.coco.json",
                "test": "test/_annotations.coco.json",
            },
            {"train": "train", "val": "valid", "test": "test"},
        ),
    ],
)
def test_the_usual_places(tmp_path: Path, files: dict[str, str], folders: dict[str, str]) -> None:
    for split, file in files.items():
        write_coco(tmp_path, coco(), file, folders[split])
    assert find_coco(tmp_path) == {split: tmp_path / file for split, file in files.items()}
    for split, file in files.items():
        first = read_coco(tmp_path / file, tmp_path).records[0].file
        assert os.path.samefile(first, tmp_path / folders[split] / "0.png")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(), "labels/mine.json", "pictures")
    content = coco()
    for image in content["images"]:
        image["file_name"] = f"pictures/{image['file_name']}"
    (tmp_path / "labels/mine.json").write_text(json.dumps(content))
    (found,) = find_coco(tmp_path, "labels/mine.json").values()
    assert os.path.samefile(read_coco(found, tmp_path).records[2].file, tmp_path / "pictures/2.png")
    assert find_coco(tmp_path) == {}
    with pytest.raises(ValueError, match=r"data.annotations other.json: no such file below"):
        find_coco(tmp_path, "other.json")
    with pytest.raises(ValueError, match=r"data.annotations ../other.json: outside of"):
        find_coco(tmp_path, "../other.json")


def test_two_files_for_a_split(tmp_path: Path) -> None:
    for year in (2014, 2017):
        write_coco(tmp_path, coco(), f"annotations/instances_train{year}.json")
    with pytest.raises(ValueError, match=r"instances_train2014.json, instances_train2017.json are all for train"):
        find_coco(tmp_path)


def test_missing_images_are_counted_and_named(tmp_path: Path) -> None:
    path = write_coco(tmp_path, coco(6))
    for at in (1, 2, 4, 5):
        (tmp_path / f"images/{at}.png").unlink()
    with pytest.raises(ValueError, match=r"4 of 6 images are missing \(1.png, 2.png, 4.png, …\), expected them in"):
        read_coco(path, tmp_path)


@pytest.mark.parametrize("name", ["../../secret.png", "a/../../../secret.png", "/etc/hostname"])
def test_images_outside_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    content = coco()
    path = write_coco(root, content)
    rectangles([]).save(tmp_path / "secret.png")
    content["images"][1]["file_name"] = name
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"image 1 is {name}: outside of .*, expected a file below it"):
        read_coco(path, root)


def test_an_absolute_name_below_the_root(tmp_path: Path) -> None:
    content = coco()
    path = write_coco(tmp_path, content)
    content["images"][0]["file_name"] = str(tmp_path / "images/0.png")
    path.write_text(json.dumps(content))
    assert read_coco(path, tmp_path).records[0].file == str(tmp_path / "images/0.png")


# ---------------------------------------------------------------------------------------------------- broken files


def changed(group: str, at: int, **values: Any) -> dict[str, Any]:
    content = coco()
    content[group][at] |= values
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(coco())[:300], "no whole JSON"),
        ("", "no whole JSON"),
        ("[" * 100_000, "no whole JSON"),
        ("\x00\x01", "no whole JSON"),
        ("[]", "no list of images, expected COCO's images, annotations and categories"),
        ('{"images": {}}', "no list of images"),
        ({key: value for key, value in coco().items() if key != "annotations"}, "no list of annotations"),
        ({key: value for key, value in coco().items() if key != "categories"}, "no list of categories"),
        (coco(categories=[]), "its list of categories is empty"),
        (coco(0), "its list of images is empty"),
        (coco(annotations=[3]), "3 among its annotations, expected an object"),
        (changed("annotations", 1, image_id=77), "annotation 1 is of image 77, which is none of the images"),
        (changed("annotations", 1, image_id="1"), "annotation 1 has the image_id '1', expected an integer"),
        (changed("images", 1, id=0), "two of its images have the id 0"),
        (changed("annotations", 1, id=0), "two of its annotations have the id 0"),
        (changed("categories", 1, id=1), "two of its categories have the id 1"),
        (changed("categories", 1, name="cat"), "categories 1, 2 are all named 'cat'"),
        (changed("categories", 1, name=None), "category 2 has the name None, expected a text"),
        (changed("annotations", 2, category_id=9), "annotation 10 has the category_id 9, which no category has"),
        (changed("annotations", 2, category_id=True), "annotation 10 has the category_id True, expected an integer"),
        (changed("annotations", 2, bbox=None), r"annotation 10 has no bbox; expected \[x, y, width, height\]"),
        (
            changed("annotations", 2, bbox=[], segmentation=[[1, 2, 3, 4, 5, 6]]),
            "annotation 10 has no bbox, and a segmentation, of which none is made",
        ),
        (changed("annotations", 2, bbox=[1, 2, 3]), r"annotation 10 has the bbox \[1, 2, 3\], expected"),
        (changed("annotations", 2, bbox=[1, 2, 3, "4"]), r"annotation 10 has the bbox \[1, 2, 3, '4'\], expected"),
        (changed("annotations", 2, bbox="1234"), "annotation 10 has the bbox '1234'"),
        (changed("annotations", 2, iscrowd=2), "annotation 10 has the iscrowd 2, expected 0 or 1"),
        (changed("annotations", 2, area="big"), "annotation 10 has the area 'big', expected a number"),
        (changed("images", 2, width="60"), "image 2 has the width '60', expected an integer"),
        (changed("images", 2, height=0), "image 2 has the size 60 × 0, expected pixels above 0"),
        (changed("images", 2, file_name=7), "image 2 has the file_name 7, expected a text"),
        (changed("images", 2, id=None), "entry 3 of its images has the id None, expected an integer"),
        (changed("images", 2, id=2**70), "entry 3 of its images has the id 11805.*, expected an integer"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, content: Any, message: str) -> None:
    write_coco(tmp_path, coco())
    path = tmp_path / "annotations.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        read_coco(path, tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_the_blood_cells(shared: Path) -> None:
    root = shared / "data/bccd"
    (path,) = find_coco(root).values()
    found = read_coco(path, root)
    assert (len(found.records), sum(len(record.boxes) for record in found.records)) == (292, 3941)
    assert (found.labels, found.category_ids) == (["WBC", "RBC", "Platelets"], [1, 2, 3])
    sample = load(found.records[0])
    assert sample.image.size == (640, 480)
    assert len(sample.boxes) == 20
