"""Annotations of detection in COCO's JSON format, and the usual places for them and their images."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from tasks.detr.records import Annotations, Objects, Size, listed, records_of

Item = dict[str, Any]

SPLITS = {"train": ("train",), "val": ("val", "valid"), "test": ("test",)}
"""The names that a split goes by."""


# --------------------------------------------------------------------------------------------------------- places


def find_coco(root: Path, annotations: str | None = None) -> dict[str, Path]:
    """The files of annotations by split; one file without a split is "train". Empty where there is none.

    `annotations` names a file below `root`; else these are looked for: annotations.json;
    annotations/instances_train*.json, instances_val*.json and instances_test*.json as COCO itself has them;
    train/_annotations.coco.json beside valid/ and test/ as Roboflow writes them.

    Raises:
        ValueError: no such file, or several for one split.
    """
    if annotations is not None:
        path = Path(_below(root, root, annotations, f"data.annotations {annotations}"))
        if not path.is_file():
            raise ValueError(f"data.annotations {annotations}: no such file below {root}, expected COCO annotations")
        return {"train": path}
    if (root / "annotations.json").is_file():
        return {"train": root / "annotations.json"}
    found = {}
    for split, names in SPLITS.items():
        files = sorted((root / "annotations").glob(f"instances_{split}*.json"))
        files = files or [path for name in names if (path := root / name / "_annotations.coco.json").is_file()]
        if len(files) > 1:
            several = listed([path.name for path in files])
            raise ValueError(f"{files[0].parent}: {several} are all for {split}, expected one; say data.annotations")
        if files:
            found[split] = files[0]
    return found


def _image_folder(path: Path, root: Path, names: list[str]) -> Path:
    """Where the images of a file of annotations lie: the usual place that has the most of the first few."""
    split = path.stem.removeprefix("instances_")
    places = [root / split, root / "images" / split, path.parent / "images", path.parent, root / "images", root]

    def fit(place: Path) -> tuple[int, bool]:
        return sum(os.path.isfile(place / name) for name in names[:100]), place.is_dir()

    return max(places, key=fit)


def _below(root: Path, folder: Path, name: str, owner: str) -> str:
    """The file of that name in `folder`; ValueError where it is not below `root`."""
    path = os.path.join(folder, name)
    if not os.path.abspath(path).startswith(os.path.join(os.path.abspath(root), "")):
        raise ValueError(f"{owner}: outside of {root}, expected a file below it")
    return path


# -------------------------------------------------------------------------------------------------------- reading


def read_coco(path: Path, root: Path) -> Annotations:
    """Images and their boxes. Categories of any ids become classes in the order of their ids.

    Boxes without area are dropped and those that reach out of their image clipped, each kind told in one warning.

    Raises:
        ValueError: one line that names the file and the entry: no whole JSON, a list that is missing, a value of the
            wrong type, an id that comes twice or that nothing has, an annotation without a box, images that are
            missing or that lie outside of `root`.
    """
    content = _parse(path)
    names = _categories(path, content["categories"], [item.get("category_id") for item in content["annotations"]])
    images = _by_id(path, "images", content["images"])
    files = _files(path, root, images)
    objects = _objects(path, images, names, content["annotations"])
    found = [(files[image_id], image_id, _size(path, item)) for image_id, item in images.items()]

    def name(at: int) -> str:
        return f"annotation {content['annotations'][at]['id']} of {os.path.basename(found[objects.image[at]][0])}"

    return Annotations(str(path), records_of(str(path), found, objects, name), list(names.values()), list(names))


def _parse(path: Path) -> dict[str, list[Item]]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, expected COCO annotations") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no whole JSON ({error}), expected COCO annotations") from None
    for name in ("images", "annotations", "categories"):
        found = content.get(name) if isinstance(content, dict) else None
        if not isinstance(found, list):
            raise ValueError(f"{path}: no list of {name}, expected COCO's images, annotations and categories")
        if bad := [item for item in found if not isinstance(item, dict)]:
            raise ValueError(f"{path}: {shown(bad[0])} among its {name}, expected an object")
    for name in ("images", "categories"):
        if not content[name]:
            raise ValueError(f"{path}: its list of {name} is empty, expected at least one")
    return {name: content[name] for name in ("images", "annotations", "categories")}


def _by_id(path: Path, name: str, items: list[Item]) -> dict[int, Item]:
    found: dict[int, Item] = {}
    for at, item in enumerate(items):
        number = _integer(path, f"entry {at + 1} of its {name}", item, "id")
        if number in found:
            raise ValueError(f"{path}: two of its {name} have the id {number}, expected one each")
        found[number] = item
    return found


def _categories(path: Path, items: list[Item], used: list[Any]) -> dict[int, str]:
    """Names by id, in the order of the ids; a name comes twice in exports of a class named as what it is part of."""
    found = _by_id(path, "categories", items)
    names = {number: _text(path, f"category {number}", found[number], "name") for number in sorted(found)}
    taken = {name for number, name in names.items() if number in used}
    names = {number: name for number, name in names.items() if number in used or name not in taken}
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        numbers = listed([str(number) for number, name in names.items() if name == twice[0]])
        raise ValueError(f"{path}: categories {numbers} are all named {twice[0]!r}, expected a name each")
    return names


def _files(path: Path, root: Path, images: dict[int, Item]) -> dict[int, str]:
    """Where each image lies; all are there."""
    names = {number: _text(path, f"image {number}", item, "file_name") for number, item in images.items()}
    folder = _image_folder(path, root, list(names.values()))
    files = {number: _below(root, folder, name, f"{path}: image {number} is {name}") for number, name in names.items()}
    if missing := [names[number] for number, file in files.items() if not os.path.isfile(file)]:
        raise ValueError(
            f"{path}: {len(missing)} of {len(files)} images are missing ({listed(missing)}), expected them in {folder}"
        )
    return files


def _objects(path: Path, images: dict[int, Item], names: dict[int, str], items: list[Item]) -> Objects:
    """What the annotations say, in their order."""
    place = {image_id: at for at, image_id in enumerate(images)}
    position = {category_id: at for at, category_id in enumerate(names)}
    owners = []
    for annotation_id, item in _by_id(path, "annotations", items).items():
        image_id = _integer(path, f"annotation {annotation_id}", item, "image_id")
        if image_id not in place:
            raise ValueError(f"{path}: annotation {annotation_id} is of image {image_id}, which is none of the images")
        owners.append(place[image_id])
    return Objects(
        image=owners,
        boxes=[_box(path, item) for item in items],
        labels=[_label(path, item, position) for item in items],
        crowd=[_crowd(path, item) for item in items],
        area=[_area(path, item) for item in items],
    )


# --------------------------------------------------------------------------------------------------- single values


def _integer(path: Path, owner: str, item: Item, key: str) -> int:
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{path}: {owner} has the {key} {shown(value)}, expected an integer")
    return value


def _text(path: Path, owner: str, item: Item, key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}: {owner} has the {key} {shown(value)}, expected a text")
    return value


def _number(value: Any) -> float:
    """Also what is not finite; TypeError for what is no number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _size(path: Path, image: Item) -> Size | None:
    if image.get("width") is None or image.get("height") is None:
        return None
    height, width = (_integer(path, f"image {image['id']}", image, key) for key in ("height", "width"))
    if height < 1 or width < 1:
        raise ValueError(f"{path}: image {image['id']} has the size {width} × {height}, expected pixels above 0")
    return height, width


def _box(path: Path, item: Item) -> tuple[float, float, float, float]:
    found = item.get("bbox")
    if found is None or found == []:
        beside = ", and a segmentation, of which none is made" if item.get("segmentation") else ""
        raise ValueError(f"{path}: annotation {item['id']} has no bbox{beside}; expected [x, y, width, height]")
    try:
        x, y, width, height = map(_number, found)
    except (TypeError, ValueError):
        raise ValueError(
            f"{path}: annotation {item['id']} has the bbox {shown(found)}, expected [x, y, width, height]"
        ) from None
    if width <= 0 or height <= 0:  # said here, where rounding cannot hide it
        return math.nan, y, x, y
    return x, y, x + width, y + height


def _label(path: Path, item: Item, position: dict[int, int]) -> int:
    category_id = _integer(path, f"annotation {item['id']}", item, "category_id")
    if category_id not in position:
        raise ValueError(
            f"{path}: annotation {item['id']} has the category_id {category_id}, which no category has; "
            f"expected one of {listed([str(number) for number in position])}"
        )
    return position[category_id]


def _crowd(path: Path, item: Item) -> bool:
    value = item.get("iscrowd", 0)
    if value not in (0, 1):
        raise ValueError(f"{path}: annotation {item['id']} has the iscrowd {shown(value)}, expected 0 or 1")
    return bool(value)


def _area(path: Path, item: Item) -> float:
    """NaN where the file has none."""
    value = item.get("area")
    if value is None:
        return math.nan
    try:
        return _number(value)
    except TypeError:
        raise ValueError(f"{path}: annotation {item['id']} has the area {shown(value)}, expected a number") from None
