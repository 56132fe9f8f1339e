"""Images with boxes: the embedded drawn scenes, COCO's files, or Pascal VOC's folders.

Legend: B batch, M most boxes of an image in it, N boxes of an image, H height, W width.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from multimodal.data import DetectionPreprocess, detection_transform, seeded
from multimodal.data.detection import IMAGENET_MEAN, IMAGENET_STD
from multimodal.data.image import Interpolation, ToTensor
from multimodal.data.scenes import SHAPES, SIDE, draw_scene
from tasks.data import Key, TaskData
from tasks.detr.augment import SCALES, AugmentDetection, DetectionAugmentation
from tasks.detr.coco import find_coco, read_coco
from tasks.detr.records import Annotations, Record, Sample, load
from tasks.detr.voc import is_voc, read_voc

DatasetName = Literal["scenes", "coco", "voc"]

SERIES = {"train": 1, "val": 2, "test": 3}
"""Seeds of the drawn scenes."""
UNSEEN = 300
"""Number of drawn scenes in val, and in test."""
EDGES = {"scenes": (SIDE, SIDE), "coco": (800, 1333), "voc": (800, 1333)}

NO_AUGMENTATION = DetectionAugmentation()
PHOTOS = DetectionAugmentation(horizontal_flip=0.5, scales=SCALES, crop=0.5)
AUGMENTATION = {"scenes": DetectionAugmentation(horizontal_flip=0.5), "coco": PHOTOS, "voc": PHOTOS}


class Scenes:
    """Drawn scenes, each kept in memory once it is drawn; the classes are the shapes."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed = seed
        self.count = count
        self.drawn: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index not in self.drawn:
            scene = draw_scene(self.seed, index)
            boxes = np.array(scene.boxes, np.float32).reshape(-1, 4)
            self.drawn[index] = Sample(
                image=scene.image,
                image_id=index,
                boxes=boxes,
                labels=np.array([SHAPES.index(shape) for shape in scene.shapes], np.int64),
                crowd=np.zeros(len(boxes), np.bool_),
                area=np.prod(boxes[:, 2:] - boxes[:, :2], axis=1),
            )
        return self.drawn[index]

    @property
    def fingerprint(self) -> str:
        return f"{self.count} scenes of series {self.seed}"


class Files:
    """Images of files, decoded each time."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        return load(self.records[index])

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for record in self.records:
            digest.update(f"{os.path.basename(record.file)}/{record.image_id}/{len(record.labels)}\n".encode())
            digest.update(record.boxes.tobytes() + record.labels.tobytes() + record.crowd.tobytes())
        return digest.hexdigest()


class DetectionDataset(Dataset[dict[str, Any]]):
    """Items, by key or by index alone, which `collate` makes a batch of; its fields are those of `DetectionData`.

    Augmentation draws its random numbers from the seed and that key alone; None = none.
    """

    def __init__(
        self,
        samples: Scenes | Files,
        preprocess: DetectionPreprocess,
        augmentation: DetectionAugmentation | None,
        seed: int,
    ) -> None:
        self.samples = samples
        self.transform = detection_transform(preprocess)
        self.augment = AugmentDetection(preprocess, augmentation) if augmentation else None
        self.to_tensor = ToTensor(preprocess)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def fingerprint(self) -> str:
        """Changes with the samples and their order, though not with the place of their folder."""
        return self.samples.fingerprint

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        # Trainer flags such as overfit_batches bring a sampler of their own, which knows no epoch.
        key = key if isinstance(key, tuple) else (0, key)
        sample = self.samples[key[1]]
        size = (sample.image.height, sample.image.width)
        if self.augment is None:
            pixels = self.transform(sample.image)
        else:
            with seeded(self.seed, *key):
                sample = self.augment(sample)
            pixels = self.to_tensor(sample.image)
        x0, y0, x1, y1 = torch.from_numpy(sample.boxes).unbind(1)
        sides = torch.tensor([sample.image.width, sample.image.height] * 2)
        return {
            "image": pixels,
            "boxes": torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], 1) / sides,
            "labels": torch.from_numpy(sample.labels),
            "crowd": torch.from_numpy(sample.crowd),
            "area": torch.from_numpy(sample.area),
            "size": size,
            "image_id": sample.image_id,
        }


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch (see `DetectionData`) of images and boxes [N, ...] of any number, padded to the most."""
    height, width = (max(item["image"].shape[side] for item in items) for side in (1, 2))
    most = max(1, *(len(item["labels"]) for item in items))
    image, valid = [], torch.zeros(len(items), height, width, dtype=torch.bool)
    for item, mask in zip(items, valid, strict=True):
        _, rows, columns = item["image"].shape
        image.append(pad(item["image"], (0, width - columns, 0, height - rows)))
        mask[:rows, :columns] = True

    def rows_of(name: str, value: float = 0) -> Tensor:
        parts = [item[name] for item in items]
        # The last dimensions come first in what pad is told.
        return torch.stack([pad(part, [0, 0] * (part.ndim - 1) + [0, most - len(part)], value=value) for part in parts])

    return {
        "image": torch.stack(image),
        "valid": valid,
        "boxes": rows_of("boxes"),
        "labels": rows_of("labels", -1),
        "crowd": rows_of("crowd"),
        "area": rows_of("area"),
        "size": torch.tensor([item["size"] for item in items]),
        "image_id": torch.tensor([item["image_id"] for item in items]),
    }


class DetectionData(TaskData):
    """Images and the boxes of the objects in them, by class.

    A batch holds, all padded to the largest or the most of it:

    - image: float32 [B, 3, H, W], normalised, zero on the padding, which is right and below
    - valid: bool [B, H, W], True = a pixel of the image
    - boxes: float32 [B, M, 4], centre x, centre y, width and height as shares of the image's own width and height
    - labels: int64 [B, M], index of the class, -1 = no box
    - crowd: bool [B, M], True = a crowd, neither to be found nor background
    - area: float32 [B, M], pixels of the image as it was before any resize, as the annotations have it
    - size: int64 [B, 2], height and width of that image, upright
    - image_id: int64 [B]

    What comes with train and val but without test is tested on val; what comes without any of these is split by
    split_seed, image by image.

    Args:
        dataset: scenes, drawn ones that come with the suite; coco, annotations in its JSON format; voc, folders as
            Pascal VOC has them; None = what lies in root, or scenes where there is no root.
        root: Folder with annotations and images, in one of the usual layouts.
        source: Where people get the data that belong into root; told where root is missing.
        annotations: File of COCO annotations, below root; None = those of the usual layouts.
        num_scenes: Number of drawn scenes to train on; those of val and test are always the same 300 each.
        shortest_edge: Length in pixels to which the shorter side is resized; None = 128 for scenes, else 800.
        longest_edge: Length in pixels that the longer side may have; None = in DETR's ratio to the shorter one.
        mean: Subtracted from each channel, where white is 1; None = that of ImageNet.
        std: What each channel is then divided by; None = that of ImageNet.
        interpolation: How images are resized: nearest, bilinear, bicubic or lanczos.
        labels: Class names in the order of a checkpoint's outputs; None = those of the data.
        category_ids: The id of each of `labels`; without labels they are those of the data.
        augment: Random changes in training; what is left None suits the data set.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: annotations or images that are missing or broken, or classes that `labels` or train do not have; no
            root where the data set needs one, or one where it takes none.
    """

    collate = staticmethod(collate)

    def __init__(
        self,
        *,
        dataset: DatasetName | None = None,
        root: str | None = None,
        source: str | None = None,
        annotations: str | None = None,
        num_scenes: int = 4000,
        shortest_edge: int | None = None,
        longest_edge: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: Interpolation = "bilinear",
        labels: list[str] | None = None,
        category_ids: list[int] | None = None,
        augment: DetectionAugmentation = NO_AUGMENTATION,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if num_scenes < 1:
            raise ValueError(f"num_scenes is {num_scenes}, expected at least 1")
        name = dataset or _kind(root, annotations)
        _check_options(name, root, source, annotations)
        self.root = root
        self.in_memory = name == "scenes"
        self.num_scenes = num_scenes
        self.augmentation = augment.over(AUGMENTATION[name])
        self._found = {} if root is None else _read(name, Path(root), annotations)
        self.labels, self.category_ids = self._classes(labels, category_ids)
        edges = _edges(name, shortest_edge, longest_edge)
        self.preprocess = DetectionPreprocess(
            mean=IMAGENET_MEAN if mean is None else tuple(mean),
            std=IMAGENET_STD if std is None else tuple(std),
            interpolation=interpolation,
            shortest_edge=edges[0],
            longest_edge=edges[1],
            category_ids=tuple(self.category_ids),
        )

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def _classes(self, labels: list[str] | None, category_ids: list[int] | None) -> tuple[list[str], list[int]]:
        """Names of the classes, and their ids."""
        if labels is None:
            if self.root is None:
                return list(SHAPES), list(range(1, len(SHAPES) + 1))
            first = self._found.get("train") or next(iter(self._found.values()))
            return first.labels, first.category_ids
        ids = list(range(len(labels))) if category_ids is None else category_ids
        if len(ids) != len(labels):
            raise ValueError(
                f"data.category_ids has {len(ids)} ids, expected one for each of {len(labels)} data.labels"
            )
        return list(labels), list(ids)

    def setup(self, stage: str) -> None:
        wanted = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ())
        for split in wanted:
            if split not in self.datasets:
                augmentation = self.augmentation if split == "train" else None
                samples = self._samples(split)
                self.datasets[split] = DetectionDataset(samples, self.preprocess, augmentation, self.seed)

    def _samples(self, split: str) -> Scenes | Files:
        if self.root is None:
            self._index_of(list(SHAPES), set(range(len(SHAPES))), "the drawn scenes")
            return Scenes(SERIES[split], self.num_scenes if split == "train" else UNSEEN)
        records = self._splits[split]
        if not records:
            raise ValueError(
                f"data root {self.root}: no image is left for {split}, expected more images, or that split"
            )
        if split == "test" and records is self._splits["val"]:
            rank_zero_warn(f"data root {self.root}: no images for testing, so val is tested on")
        return Files(records)

    @cached_property
    def _splits(self) -> dict[str, Sequence[Record]]:
        found = {split: self._mapped(annotations) for split, annotations in self._found.items()}
        return self.complete(found, lambda _: None)

    def _mapped(self, annotations: Annotations) -> list[Record]:
        """The records with the indices of `self.labels`."""
        used = {int(label) for record in annotations.records for label in record.labels}
        index = self._index_of(annotations.labels, used, annotations.source)
        return [replace(record, labels=index[record.labels]) for record in annotations.records]

    def _index_of(self, names: list[str], used: set[int], where: str) -> NDArray[np.int64]:
        """For each of the names its index in `self.labels`; every one that is used must have one."""
        position = {name: at for at, name in reversed(list(enumerate(self.labels)))}
        if unknown := [names[at] for at in sorted(used) if names[at] not in position]:
            raise ValueError(
                f"{where}: class {unknown[0]} is none of the {len(self.labels)} classes of the checkpoint or of train "
                f"({len(unknown)} such), expected these; to train new ones start from a checkpoint with --init"
            )
        return np.array([position.get(name, -1) for name in names], np.int64)


def _kind(root: str | None, annotations: str | None) -> DatasetName:
    """Which of the data sets lies in a folder."""
    if root is None:
        return "scenes"
    return "voc" if annotations is None and is_voc(Path(root)) and not find_coco(Path(root)) else "coco"


def _check_options(name: str, root: str | None, source: str | None, annotations: str | None) -> None:
    if name == "scenes" and root is not None:
        raise ValueError(f"data.root is {root} and data.dataset scenes, which need none: expected one of them")
    if name != "coco" and annotations is not None:
        raise ValueError(f"data.annotations is {annotations} and data.dataset {name}: expected it with coco alone")
    if name != "scenes" and root is None:
        told = f"; the data come from {source}" if source else ""
        raise ValueError(f"data.root is missing, expected --data.root FOLDER for data.dataset {name}{told}")


def _read(name: str, root: Path, annotations: str | None) -> dict[str, Annotations]:
    if not root.is_dir():
        found = "a file" if root.exists() else "no such folder"
        raise ValueError(f"data root {root}: {found}, expected a folder with annotations and images")
    if name == "voc":
        if not is_voc(root):
            raise ValueError(f"data root {root}: no Pascal VOC folder, expected Annotations and JPEGImages in it")
        return read_voc(root)
    files = find_coco(root, annotations)
    if not files:
        raise ValueError(
            f"data root {root}: no annotations found, expected annotations.json, annotations/instances_train*.json, "
            "train/_annotations.coco.json, Pascal VOC's Annotations and JPEGImages, or --data.annotations FILE"
        )
    return {split: read_coco(path, root) for split, path in files.items()}


def _edges(name: str, shortest: int | None, longest: int | None) -> tuple[int, int]:
    default = EDGES[name]
    if shortest is None:
        shortest = default[0] if longest is None else min(default[0], longest)
    return shortest, round(shortest * default[1] / default[0]) if longest is None else longest
