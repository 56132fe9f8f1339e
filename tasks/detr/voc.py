"""Annotations of detection in Pascal VOC's folders: an XML file an image."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown
from xml.etree import ElementTree

from multimodal.data import natural_key
from multimodal.data.image import IMAGE_EXTENSIONS
from tasks.detr.records import Annotations, Objects, Size, listed, records_of

Boxes = tuple[float, float, float, float]


@dataclass(frozen=True)
class _Object:
    name: str
    difficult: bool
    box: Boxes


@dataclass(frozen=True)
class _Picture:
    file: str
    size: Size | None
    objects: list[_Object]


def is_voc(root: Path) -> bool:
    """Whether a folder looks like one of Pascal VOC's."""
    return (root / "Annotations").is_dir() and (root / "JPEGImages").is_dir()


def read_voc(root: Path) -> dict[str, Annotations]:
    """The annotations by split, as the lists in ImageSets/Main say; without lists all images are "train".

    Where there is no train.txt but trainval.txt, that is "train". Coordinates count from 1 and include the last pixel.
    Classes come in natural order, and get category ids from 1 on. Objects that are marked as difficult are neither to
    be found nor wrong, as crowds are.

    Raises:
        ValueError: one line that names the file: no XML or one with a document type, an entry that is missing or of
            the wrong type, an image that is missing, a list with an image that has no annotations.
    """
    files = sorted((root / "Annotations").glob("*.xml"), key=lambda path: natural_key(path.name))
    if not files:
        raise ValueError(f"{root / 'Annotations'}: no XML file, expected one for each image")
    stems = _stems(root / "JPEGImages")
    pictures = {path.stem: _picture(path, root, stems) for path in files}
    missing = [f"{stem}.xml" for stem, picture in pictures.items() if not picture.file]
    if missing:
        raise ValueError(
            f"{root / 'Annotations'}: the images of {len(missing)} of {len(files)} files are missing "
            f"({listed(missing)}), expected them in {root / 'JPEGImages'}"
        )
    names = sorted({item.name for picture in pictures.values() for item in picture.objects}, key=natural_key)
    if not names:
        raise ValueError(f"{root / 'Annotations'}: no object in {len(files)} files, expected at least one")
    number = {stem: at for at, stem in enumerate(pictures)}
    splits = _splits(root, list(pictures))
    return {
        split: _annotations(root, {number[stem]: (stem, pictures[stem]) for stem in members}, names)
        for split, members in splits.items()
    }


def _annotations(root: Path, pictures: dict[int, tuple[str, _Picture]], names: list[str]) -> Annotations:
    position = {name: at for at, name in enumerate(names)}
    found = [(at, stem, item) for at, (stem, picture) in enumerate(pictures.values()) for item in picture.objects]
    objects = Objects(
        image=[at for at, _, _ in found],
        boxes=[item.box for _, _, item in found],
        labels=[position[item.name] for _, _, item in found],
        crowd=[item.difficult for _, _, item in found],
        area=[math.nan] * len(found),
    )
    images = [(picture.file, number, picture.size) for number, (_, picture) in pictures.items()]
    source = str(root / "Annotations")
    records = records_of(source, images, objects, lambda at: f"{found[at][2].name} in {found[at][1]}.xml")
    return Annotations(source, records, names, list(range(1, len(names) + 1)))


def _splits(root: Path, stems: list[str]) -> dict[str, list[str]]:
    folder = root / "ImageSets" / "Main"
    lists = {name: folder / f"{name}.txt" for name in ("train", "val", "trainval", "test")}
    lists = {name: path for name, path in lists.items() if path.is_file()}
    if not lists:
        return {"train": stems}
    trainval = lists.pop("trainval", None)
    if "train" not in lists and trainval:
        lists["train"] = trainval
        lists.pop("val", None)  # a part of it
    known = set(stems)
    splits = {}
    for split, path in lists.items():
        # A second column, where there is one, says whether the image has some class.
        members = [line.split()[0] for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if unknown := [stem for stem in dict.fromkeys(members) if stem not in known]:
            raise ValueError(
                f"{path}: {len(unknown)} of its images have no annotations ({listed(unknown)}), expected "
                f"{root / 'Annotations'} to have a file for each"
            )
        splits[split] = list(dict.fromkeys(members))
    return splits


def _stems(folder: Path) -> dict[str, str]:
    """Images by their name without extension."""
    names = sorted(name for name in os.listdir(folder) if os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS)
    return {os.path.splitext(name)[0]: str(folder / name) for name in names}


# ------------------------------------------------------------------------------------------------------- one file


class _Tree(ElementTree.TreeBuilder):
    """A document without a type, in which alone entities could be defined that grow without bound."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("a document type, expected none")


def _picture(path: Path, root: Path, stems: dict[str, str]) -> _Picture:
    try:
        top = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_Tree()))
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise ValueError(f"{path}: no whole XML ({error}), expected Pascal VOC annotations") from None
    size = _size(path, top.find("size"))
    objects = [_object(path, item) for item in top.iter("object")]
    return _Picture(_file(path, root, top.findtext("filename"), stems), size, objects)


def _file(path: Path, root: Path, name: str | None, stems: dict[str, str]) -> str:
    """The image: that of the same name, else the one that the file names; "" where it is missing."""
    if path.stem in stems:
        return stems[path.stem]
    file = os.path.join(root, "JPEGImages", (name or "").strip())
    if not os.path.abspath(file).startswith(os.path.join(os.path.abspath(root), "")):
        raise ValueError(f"{path}: its image is {name}, outside of {root}, expected a file in JPEGImages")
    return file if os.path.isfile(file) else ""


def _size(path: Path, item: ElementTree.Element | None) -> Size | None:
    if item is None:
        return None
    width, height = (_number(path, "size", item, key) for key in ("width", "height"))
    if not math.isfinite(width * height):
        raise ValueError(f"{path}: size is {width:g} × {height:g}, expected pixels")
    return (int(height), int(width)) if height > 0 and width > 0 else None  # some tools write 0 for "not known"


def _object(path: Path, item: ElementTree.Element) -> _Object:
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{path}: an object without name, expected the name of its class")
    box = item.find("bndbox")
    if box is None:
        raise ValueError(f"{path}: the object {name} has no bndbox, expected xmin, ymin, xmax and ymax")
    x0, y0, x1, y1 = (_number(path, f"the bndbox of {name}", box, key) for key in ("xmin", "ymin", "xmax", "ymax"))
    return _Object(name, (item.findtext("difficult") or "").strip() == "1", (x0 - 1, y0 - 1, x1, y1))


def _number(path: Path, owner: str, item: ElementTree.Element, key: str) -> float:
    text = item.findtext(key)
    try:
        return float(text or "")
    except ValueError:
        raise ValueError(f"{path}: {owner} has the {key} {shown(text)}, expected a number") from None
