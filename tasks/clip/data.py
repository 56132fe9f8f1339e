"""Images with captions: the embedded drawn scenes, a table of captions, folders of classes, or WebDataset shards.

Legend: B images of a batch, T texts of it, N tokens of the longest, C channels, H height, W width.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from multimodal.data import Augmentation, CLIPTokenizer, ImagePreprocess, eval_transform, seeded, train_transform
from multimodal.data.folder import class_names, scan
from multimodal.data.image import CropMode, Interpolation, Transform
from multimodal.pretrained.published_clip import OPENAI_MEAN, OPENAI_STD
from tasks.clip.metrics import NO_IMAGE
from tasks.clip.samples import DEFAULT_TEMPLATES, Classes, Samples, Scenes, check_templates
from tasks.clip.shards import Shards, has_shards, read_shards
from tasks.clip.table import SUFFIXES, Files, TableOptions, by_caption, read_table
from tasks.data import Key, TaskData
from tasks.table import find_table

DatasetName = Literal["scenes", "captions", "folder", "shards"]

NO_AUGMENTATION = Augmentation()
TABLE = TableOptions()
AUGMENTATION = {
    "scenes": Augmentation(crop_scale=(0.7, 1.0), crop_ratio=(0.85, 1.18), horizontal_flip=0.5),
    # A caption may say what is left and right.
    **dict.fromkeys(("captions", "folder", "shards"), Augmentation(crop_scale=(0.9, 1.0))),
}


class CaptionDataset(Dataset[dict[str, Any]]):
    """Items, by key or by index alone, which `collate` makes a batch of.

    In training an item has one of its captions. The caption and the transform draw their random numbers from the seed
    and that key alone. To measure it has all captions; with the first item come the candidates that no image has.
    """

    def __init__(self, samples: Samples, transform: Transform, *, training: bool, seed: int) -> None:
        self.samples = samples
        self.transform = transform
        self.training = training
        self.seed = seed
        if isinstance(samples, Shards):
            self.shuffle = samples.shuffle

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def fingerprint(self) -> str:
        return self.samples.fingerprint

    def __getitem__(self, key: Key | int) -> dict[str, Any]:
        # Trainer flags such as overfit_batches bring a sampler of their own, which knows no epoch.
        key = key if isinstance(key, tuple) else (0, key)
        index = key[1]
        sample = self.samples[index]
        texts = list(zip(sample.captions, sample.caption_ids, strict=True))
        with seeded(self.seed, *key):
            if self.training and len(texts) > 1:
                texts = [texts[int(torch.randint(len(texts), ()))]]
            try:
                pixels = self.transform(sample.image)
            except ValueError as error:
                raise ValueError(f"image {index} ({texts[0][0]!r:.60}): {error}") from None
        owners = [index] * len(texts)
        if index == 0 and not self.training:
            texts += self.samples.candidates
            owners += [NO_IMAGE] * len(self.samples.candidates)
        captions, caption_ids = zip(*texts, strict=True)
        return {
            "image": pixels,
            "image_id": index,
            "captions": captions,
            "caption_id": caption_ids,
            "caption_of": owners,
        }


def collate(items: Sequence[dict[str, Any]], tokenizer: CLIPTokenizer) -> dict[str, Tensor]:
    """A batch (see `CaptionData`)."""

    def joined(name: str) -> list[Any]:
        return [value for item in items for value in item[name]]

    return {
        "image": torch.stack([item["image"] for item in items]),
        "image_id": torch.tensor([item["image_id"] for item in items]),
        "tokens": tokenizer(joined("captions")),
        "caption_id": torch.tensor(joined("caption_id")),
        "caption_of": torch.tensor(joined("caption_of")),
    }


class CaptionData(TaskData):
    """Images and what is said of them.

    A batch holds

    - image: float32 [B, 3, H, W], normalised
    - image_id: int64 [B]
    - tokens: int64 [T, N], cut at the longest; in training there is one text an image, T = B, else all of them
    - caption_id: int64 [T], equal for captions that mean the same
    - caption_of: int64 [T], the image_id of the image whose caption it is, or -1

    Val and test of the scenes show one object each, of 16 pairs of colour and shape that training never shows, and are
    to be told from all 64. What comes without val, or without val and test, is split by split_seed: a table by its
    captions, of which the held-out ones are then never trained on; folders class by class; shards sample by sample.

    Args:
        dataset: scenes, drawn ones that come with the suite; captions, a table of files and captions; folder, images
            by class; shards, tar files in WebDataset's format; None = what lies in root, or scenes without root.
        root: Folder of the data, with folders train, val and perhaps test for classes and shards.
        source: Where people get the data that belong into root; told where root is missing.
        table: How the table is read.
        templates: Captions of classes, with {} where the name of the class goes; measured is by the first.
        num_scenes: Number of drawn scenes to train on.
        image_size: Side, or height and width, of what the network sees, in pixels.
        context_length: Most tokens of a caption, with those that begin and end it.
        mean: Subtracted from each channel, where white is 1; None = that of CLIP.
        std: What each channel is then divided by; None = that of CLIP.
        interpolation: How images are resized: nearest, bilinear, bicubic or lanczos.
        crop_pct: Share of the resized image's side that evaluation cuts out of its centre.
        crop_mode: center keeps the aspect ratio and loses edges, squash does not keep it.
        augment: Random changes in training; what is left None suits the data set.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: no root where the data set needs one, or one where it takes none; data that are missing or broken.
    """

    def __init__(
        self,
        *,
        dataset: DatasetName | None = None,
        root: str | None = None,
        source: str | None = None,
        table: TableOptions = TABLE,
        templates: tuple[str, ...] = DEFAULT_TEMPLATES,
        num_scenes: int = 8000,
        image_size: int | tuple[int, int],
        context_length: int,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        interpolation: Interpolation = "bicubic",
        crop_pct: float = 1.0,
        crop_mode: CropMode = "center",
        augment: Augmentation = NO_AUGMENTATION,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if num_scenes < 1:
            raise ValueError(f"num_scenes is {num_scenes}, expected at least 1")
        self.table = table
        self.templates = check_templates(templates)
        self.name = _named(dataset, root, source, table)
        self.root = root
        self.in_memory = self.name == "scenes"
        self.num_scenes = num_scenes
        self.augmentation = augment.over(AUGMENTATION[self.name])
        self.tokenizer = CLIPTokenizer(context_length)
        self.collate = partial(collate, tokenizer=self.tokenizer)
        self.preprocess = ImagePreprocess(
            size=(image_size, image_size) if isinstance(image_size, int) else image_size,
            mean=tuple(OPENAI_MEAN if mean is None else mean),
            std=tuple(OPENAI_STD if std is None else std),
            interpolation=interpolation,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
        )

    def setup(self, stage: str) -> None:
        wanted = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ())
        for split in wanted:
            if split not in self.datasets:
                self.datasets[split] = self._dataset(split)

    def _dataset(self, split: str) -> CaptionDataset:
        samples = Scenes(split, self.num_scenes) if self.root is None else self._samples(split)
        if not len(samples):
            raise ValueError(
                f"data root {self.root}: no image is left for {split}, expected more images, or that split"
            )
        training = split == "train"
        transform = train_transform(self.preprocess, self.augmentation) if training else eval_transform(self.preprocess)
        return CaptionDataset(samples, transform, training=training, seed=self.seed)

    def _samples(self, split: str) -> Samples:
        chosen = self._splits[split]
        if split == "test" and chosen is self._splits["val"]:
            rank_zero_warn(f"data root {self.root}: no images for testing, so val is tested on")
        if self.name == "folder":
            classes = class_names(self._found.get("train") or chosen)
            return Classes(chosen, classes, self.templates, training=split == "train")
        if self.name == "captions":
            return Files(chosen)
        found = self._found
        return found[split if split in found else "val" if "val" in found else "train"].subset(chosen)

    @cached_property
    def _found(self) -> dict[str, Any]:
        """What lies in root, by split."""
        assert self.root is not None
        root = Path(self.root)
        if self.name == "folder":
            return dict(scan(self.root))
        if self.name == "shards":
            return dict(read_shards(root))
        path = find_table(root, self.table.path, SUFFIXES, "captions")
        if path is None:
            raise ValueError(f"data root {root}: no table of captions, expected a .tsv or .csv file in it")
        return dict(read_table(path, self.table))

    @cached_property
    def _splits(self) -> dict[str, Any]:
        """Samples of train, val and test; of shards their positions."""
        found = self._found
        if self.name == "folder":
            return self.complete(found, lambda sample: sample[1])
        if self.name == "shards":
            return self.complete({split: range(len(shards)) for split, shards in found.items()}, lambda _: None)
        splits = self.complete(found, lambda record: record.captions[0], by_caption)
        if self.table.test_on == "seen":
            splits["test"] = splits["train"]
        return splits


def _named(dataset: DatasetName | None, root: str | None, source: str | None, table: TableOptions) -> DatasetName:
    """Which data set it is, as far as a look at its folder tells."""
    if root is None:
        if dataset in (None, "scenes"):
            return "scenes"
        told = f"; the data come from {source}" if source else ""
        raise ValueError(f"data.root is missing, expected --data.root FOLDER for data.dataset {dataset}{told}")
    if dataset == "scenes":
        raise ValueError(f"data.root is {root} and data.dataset scenes, which need none: expected one of them")
    place = Path(root)
    if not place.is_dir():
        found = "a file" if place.exists() else "no such folder"
        raise ValueError(f"data root {root}: {found}, expected a folder of images with captions")
    if dataset is not None:
        return dataset
    if has_shards(place):
        return "shards"
    return "captions" if find_table(place, table.path, SUFFIXES, "captions") else "folder"
