"""Folders of images, one a class, with or without splits."""

from pathlib import Path

from multimodal.data.image import list_images, natural_key

SPLITS = ("train", "val", "test")

Samples = list[tuple[str, str]]
"""Image file and class name."""


def scan(root: str) -> dict[str, Samples]:
    """The images below `root` by split, for those splits that have a folder. Nothing is decoded.

    `root` holds train/, val/ and perhaps test/, each with a folder a class (to measure a checkpoint, train/ may be
    missing); or it holds the folders of the classes itself, and all images are then "train".

    Raises:
        ValueError: no such folder, no image in it, a class without any, or a class that train does not have.
    """
    place = Path(root)
    if not place.is_dir():
        found = "a file" if place.exists() else "no such folder"
        raise ValueError(f"data root {root}: {found}, expected a folder with a folder of images for each class")
    folders = {path.name: path for path in _folders(place)}
    if not _has_splits(folders):
        return {"train": _samples(place, strict=True)}
    splits = {name: _samples(folders[name], strict=name == "train") for name in SPLITS if name in folders}
    if "train" in splits:
        known = set(class_names(splits["train"]))
        for name, samples in splits.items():
            if unknown := [label for label in class_names(samples) if label not in known]:
                raise ValueError(
                    f"{folders[name]}: has {_listed(unknown)}, expected only classes of {folders['train']}"
                )
    return splits


def class_names(samples: Samples) -> list[str]:
    """In natural order: 2 before 10."""
    return sorted({label for _, label in samples}, key=natural_key)


def _has_splits(folders: dict[str, Path]) -> bool:
    """Whether the folders are splits; "train" may also be a class, beside others such as "bus"."""
    only_splits = bool(folders) and set(folders) <= set(SPLITS)
    return only_splits or ("train" in folders and ("val" in folders or "test" in folders))


def _folders(place: Path) -> list[Path]:
    visible = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(visible, key=lambda path: natural_key(path.name))


def _samples(place: Path, *, strict: bool) -> Samples:
    """The images of each class below a folder; `strict` wants at least one of every class."""
    folders = _folders(place)
    if not folders:
        loose = len(list_images(place))
        found = f"{loose} images but no folder of a class" if loose else "an empty folder"
        raise ValueError(f"{place}: {found}, expected a folder of images for each class")
    samples: Samples = []
    for folder in folders:
        images = list_images(folder)
        if strict and not images:
            raise ValueError(f"{folder}: no image of class {folder.name}, expected at least one")
        samples += [(str(path), folder.name) for path in images]
    if not samples:
        raise ValueError(f"{place}: no image in any of its {len(folders)} folders, expected images")
    return samples


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
