"""Pascal VOC's folders: coordinates, splits, difficult objects, and files that are broken."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks.detr.records import load
from tasks.detr.voc import is_voc, read_voc
from tests.tasks.detr.drawn import COLORS, HEIGHT, WIDTH, extent, rectangles

Box = tuple[int, int, int, int]


def entry(name: str, box: tuple[object, ...], difficult: int = 0) -> str:
    """An object, its box as the file has it."""
    sides = "".join(f"<{key}>{x}</{key}>" for key, x in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox>{sides}</bndbox></object>"


def write(
    root: Path, stem: str, *objects: str, size: tuple[int, int] = (WIDTH, HEIGHT), boxes: tuple[Box, ...] = ()
) -> Path:
    for folder in ("Annotations", "JPEGImages"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    rectangles(list(boxes)).save(root / f"JPEGImages/{stem}.png")
    path = root / f"Annotations/{stem}.xml"
    sides = f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"
    path.write_text(f"<annotation><filename>{stem}.png</filename>{sides}{''.join(objects)}</annotation>")
    return path


def lists(root: Path, **splits: str) -> None:
    folder = root / "ImageSets/Main"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in splits.items():
        (folder / f"{name}.txt").write_text(text)


def test_coordinates_count_from_one_and_include_the_last_pixel(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("cat", (6, 5, 25, 30)), boxes=((5, 4, 25, 30),))
    (record,) = read_voc(tmp_path)["train"].records
    sample = load(record)
    assert tuple(sample.boxes[0]) == (5, 4, 25, 30) == extent(sample.image, COLORS[0])
    assert record.area.tolist() == [20 * 26]


def test_classes_ids_and_images_without_objects(tmp_path: Path) -> None:
    write(tmp_path, "img10", entry("dog", (1, 1, 5, 5)), entry("class 10", (1, 1, 5, 5)))
    write(tmp_path, "img2", entry("class 2", (1, 1, 5, 5)))
    write(tmp_path, "img3")
    found = read_voc(tmp_path)["train"]
    assert (found.labels, found.category_ids) == (["class 2", "class 10", "dog"], [1, 2, 3])
    assert [(record.image_id, record.labels.tolist()) for record in found.records] == [(0, [0]), (1, []), (2, [2, 1])]
    assert is_voc(tmp_path)
    assert not is_voc(tmp_path / "JPEGImages")


def test_difficult_objects_are_as_crowds(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("cat", (1, 1, 5, 5), 1), entry("cat", (6, 6, 9, 9)))
    assert read_voc(tmp_path)["train"].records[0].crowd.tolist() == [True, False]


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, {"train": ["a", "b", "c"]}),
        ({"train": "a\n", "val": "b 1\n\n", "test": "c -1"}, {"train": ["a"], "val": ["b"], "test": ["c"]}),
        ({"train": "a", "val": "b", "trainval": "a\nb"}, {"train": ["a"], "val": ["b"]}),
        ({"trainval": "c\na\na\n", "test": "b"}, {"train": ["c", "a"], "test": ["b"]}),
        ({"trainval": "a\nc", "val": "c"}, {"train": ["a", "c"]}),
        ({"val": "b"}, {"val": ["b"]}),
    ],
)
def test_splits(tmp_path: Path, named: dict[str, str], expected: dict[str, list[str]]) -> None:
    for stem in "abc":
        write(tmp_path, stem, entry("cat", (1, 1, 5, 5)))
    if named:
        lists(tmp_path, **named)
    found = read_voc(tmp_path)
    stems = {name: [Path(record.file).stem for record in part.records] for name, part in found.items()}
    assert stems == expected
    # An image keeps its number whatever the split.
    assert all("abc"[record.image_id] == Path(record.file).stem for part in found.values() for record in part.records)


def test_boxes_are_made_clean(tmp_path: Path) -> None:
    write(
        tmp_path, "a", *(entry("cat", box) for box in [(5, 5, 3, 9), (50, 30, 80, 80), ("nan", 1, 2, 3), (7, 7, 7, 7)])
    )
    with pytest.warns(UserWarning, match=r"dropped 2 boxes .*\(cat in a.xml, cat in a.xml\); clipped 1 box"):
        (record,) = read_voc(tmp_path)["train"].records
    assert record.boxes.tolist() == [[49, 29, 60, 40], [6, 6, 7, 7]]


def test_the_image_of_an_annotation(tmp_path: Path) -> None:
    """That of the same name, whatever the file says, as tools write the name on their machine into it."""
    path = write(tmp_path, "a", entry("cat", (1, 1, 5, 5)))
    path.write_text(path.read_text().replace("a.png", "C:\\me\\other.png"))
    write(tmp_path, "b", entry("cat", (1, 1, 5, 5)))
    os.rename(tmp_path / "JPEGImages/b.png", tmp_path / "JPEGImages/z.png")
    (tmp_path / "Annotations/b.xml").write_text((tmp_path / "Annotations/b.xml").read_text().replace("b.png", "z.png"))
    files = [Path(record.file).name for record in read_voc(tmp_path)["train"].records]
    assert files == ["a.png", "z.png"]


def test_sizes_that_are_not_known(tmp_path: Path) -> None:
    path = write(tmp_path, "a", entry("cat", (41, 1, 90, 5)), size=(0, 0))
    with pytest.warns(UserWarning, match="clipped 1 box"):
        (record,) = read_voc(tmp_path)["train"].records
    assert (record.size, record.boxes.tolist()) == (None, [[40, 0, 60, 5]])
    path.write_text(f"<annotation>{entry('cat', (1, 1, 5, 5))}</annotation>")
    assert read_voc(tmp_path)["train"].records[0].size is None


def test_orientation(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("cat", (6, 5, 25, 30)))
    exif = Image.Exif()
    exif[0x0112] = 6
    rectangles([(5, 4, 25, 30)]).save(tmp_path / "JPEGImages/a.png", exif=exif)
    sample = load(read_voc(tmp_path)["train"].records[0])
    assert sample.image.size == (HEIGHT, WIDTH)
    assert tuple(sample.boxes[0]) == extent(sample.image, COLORS[0])


BOMB = '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><annotation><filename>&c;</filename></annotation>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation>", "no whole XML"),
        ("", "no whole XML"),
        ("{}", "no whole XML"),
        (BOMB, r"no whole XML \(a document type, expected none\)"),
        ('<!DOCTYPE a SYSTEM "file:///etc/hostname"><annotation/>', r"a document type, expected none"),
        ("<annotation><object/></annotation>", "an object without name"),
        ("<annotation><object><name>cat</name></object></annotation>", "the object cat has no bndbox"),
        (f"<annotation>{entry('cat', (1, 'x', 3, 4))}</annotation>", "the bndbox of cat has the ymin 'x'"),
        (
            "<annotation><object><name>cat</name><bndbox/></object></annotation>",
            "the bndbox of cat has the xmin None, expected a number",
        ),
        ("<annotation><size><width>a</width></size></annotation>", "size has the width 'a', expected a number"),
        (
            "<annotation><size><width>inf</width><height>1</height></size></annotation>",
            "size is inf × 1, expected pixels",
        ),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "a")
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_voc(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_broken_folders(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    with pytest.raises(ValueError, match="no object in 1 files"):
        read_voc(tmp_path)
    write(tmp_path, "b", entry("cat", (1, 1, 5, 5)))
    lists(tmp_path, train="a\nb\nc\nd")
    with pytest.raises(ValueError, match=r"train.txt: 2 of its images have no annotations \(c, d\)"):
        read_voc(tmp_path)
    (tmp_path / "JPEGImages/a.png").unlink()
    with pytest.raises(ValueError, match=r"images of 1 of 2 files are missing \(a.xml\)"):
        read_voc(tmp_path)
    path.write_text("<annotation><filename>../../x.png</filename></annotation>")
    with pytest.raises(ValueError, match=r"a.xml: its image is ../../x.png, outside of"):
        read_voc(tmp_path)
    for file in (tmp_path / "Annotations").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="no XML file, expected one for each image"):
        read_voc(tmp_path)


def test_types(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("cat", (1.5, 1, 5, 5)))
    (record,) = read_voc(tmp_path)["train"].records
    assert record.boxes.dtype == np.float32
    assert record.boxes.tolist() == [[0.5, 0, 5, 5]]
