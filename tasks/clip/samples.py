"""What a sample is, wherever it comes from; the embedded captioned scenes, and folders of classes.

Legend: N samples.
"""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from PIL import Image

from multimodal.data import load_image
from multimodal.data.scenes import COLORS, PAIRS, SHAPES, describe, draw_scene


class Sample(NamedTuple):
    """An image and what is said of it."""

    image: Image.Image
    """Decoded, mode RGB."""
    captions: Sequence[str]
    """At least one, any of which is right."""
    caption_ids: Sequence[int]
    """Captions that mean the same have the same id, in all samples."""


class Samples(Protocol):
    """Samples by index."""

    @property
    def candidates(self) -> Sequence[tuple[str, int]]:
        """Captions and their ids that images are measured against besides their own."""

    @property
    def fingerprint(self) -> str:
        """Changes with the samples and their order, though not with the place of their folder."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


def text_id(text: str) -> int:
    """A number from 0 to 2⁶³ − 1, equal for equal texts, wherever they are read."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def digest_of(*parts: object) -> str:
    """A fingerprint of many values."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------- embedded scenes

UNSEEN = tuple(
    (color, shape)
    for i, color in enumerate(COLORS)
    for j, shape in enumerate(SHAPES)
    if (j - i) % len(SHAPES) in (0, 3)
)
"""16 of the 64 pairs of colour and shape, two of each colour and two of each shape, that training never shows."""
VAL_PAIRS = UNSEEN[::4]
"""Those by which the best checkpoint is chosen."""
TEST_PAIRS = tuple(pair for pair in UNSEEN if pair not in VAL_PAIRS)
"""The 12 that nothing but the test sees."""
TRAIN_PAIRS = tuple(pair for pair in PAIRS if pair not in UNSEEN)
"""The 48 that are trained on."""
LABELS = tuple(describe([pair]) for pair in PAIRS)
""""a red circle" and the others: what an image of one object may show."""

SEVERAL = (2, 4)
"""Least and greatest number of objects in every fifth scene to train on; the others have one."""
SERIES = {"train": 11, "val": 12, "test": 13}
"""Seeds of the drawn scenes."""
EACH = 50
"""Images of each pair in val, and in test."""


class Scenes:
    """Drawn scenes, each kept in memory once it is drawn.

    Those to train on have one to four objects, none of an unseen pair. Those to measure on have one object, of an
    unseen pair, which is to be told from all 64 pairs.

    Args:
        split: train, val or test.
        count: number of scenes to train on.
    """

    def __init__(self, split: str, count: int) -> None:
        self.seed = SERIES[split]
        self.pairs = {"train": TRAIN_PAIRS, "val": VAL_PAIRS, "test": TEST_PAIRS}[split]
        self.training = split == "train"
        self.count = count if self.training else EACH * len(self.pairs)
        self.candidates = [] if self.training else [(label, text_id(label)) for label in LABELS]
        self.drawn: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        if index not in self.drawn:
            pairs = self.pairs if self.training else [self.pairs[index % len(self.pairs)]]
            objects = SEVERAL if self.training and index % 5 == 4 else (1, 1)
            scene = draw_scene(self.seed, index, objects=objects, pairs=pairs)
            self.drawn[index] = Sample(scene.image, [scene.caption], [text_id(scene.caption)])
        return self.drawn[index]

    @property
    def fingerprint(self) -> str:
        return f"{self.count} scenes of series {self.seed}"


# ------------------------------------------------------------------------------------------------ folders of classes

DEFAULT_TEMPLATES = ("a photo of a {}.",)


class Classes:
    """Images of files by class, whose captions are templates filled with the name of the class.

    Captions of one class mean the same. To measure, each class has one caption, that of the first template.

    Args:
        files: image file and name of its class.
        classes: all classes.
        templates: texts with {} where the name of the class goes.
        training: whether all templates are used.
    """

    def __init__(
        self, files: Sequence[tuple[str, str]], classes: Sequence[str], templates: Sequence[str], *, training: bool
    ) -> None:
        self.files = files
        self.templates = templates if training else templates[:1]
        self.candidates = [] if training else [(self._captions(name)[0], text_id(name)) for name in classes]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        file, name = self.files[index]
        captions = self._captions(name)
        return Sample(load_image(file), captions, [text_id(name)] * len(captions))

    def _captions(self, name: str) -> list[str]:
        return [template.replace("{}", name.replace("_", " ")) for template in self.templates]

    @cached_property
    def fingerprint(self) -> str:
        return digest_of(*self.templates, *(f"{os.path.basename(file)}/{name}" for file, name in self.files))


def check_templates(templates: Sequence[str]) -> list[str]:
    """The templates; ValueError where one has no place for the class, or there is none."""
    if not templates:
        raise ValueError("data.templates is empty, expected at least one such as 'a photo of a {}.'")
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(f"data.templates: {template!r} has {template.count('{}')} places {{}}, expected one")
    return list(templates)
