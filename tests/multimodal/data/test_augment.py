"""Random changes to training images: what each does, and that a sample's draws depend on its key alone."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal.data import Augmentation, ImagePreprocess, eval_transform, seeded, train_transform

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))


def test_no_augmentation_is_the_evaluation_transform() -> None:
    preprocess = ImagePreprocess(size=(24, 16), mean=(0.5,) * 3, std=(0.25,) * 3)
    image = NOISE
    expected = eval_transform(preprocess)(image)
    for augmentation in (Augmentation(), Augmentation(crop_scale=(1.0, 1.0), horizontal_flip=0.0)):
        assert torch.equal(train_transform(preprocess, augmentation)(image), expected)


def test_each_augmentation_does_what_it_says() -> None:
    preprocess = ImagePreprocess(size=(16, 16), mean=(0.0,), std=(1.0,))
    image = Image.fromarray(np.asarray(NOISE)[:16, :16, 0])
    plain = eval_transform(preprocess)(image)
    assert torch.equal(train_transform(preprocess, Augmentation(horizontal_flip=1.0))(image), plain.flip(-1))
    dot = np.zeros((16, 16), np.uint8)
    dot[7:9, 7:9] = 255
    shift = train_transform(preprocess, Augmentation(translation=0.25))
    seen = set()
    for index in range(200):
        with seeded(0, 0, index):
            shifted = shift(Image.fromarray(dot))
        assert shifted.sum() == 4
        seen.add(tuple(shifted.nonzero()[0, 1:].tolist()))
    rows, columns = {row for row, _ in seen}, {column for _, column in seen}
    assert (min(rows), max(rows), min(columns), max(columns)) == (3, 11, 3, 11)
    turned = train_transform(preprocess, Augmentation(rotation=90.0))(image)
    assert not torch.equal(turned, plain)
    crop = train_transform(preprocess, Augmentation(crop_scale=(0.1, 0.2)))
    ramp = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (64, 1)))
    spans = [float(image.max() - image.min()) for image in (crop(ramp) for _ in range(20))]
    assert max(spans) < 0.7
    grown = train_transform(preprocess, Augmentation(zoom=0.5))
    sums = [float(grown(Image.fromarray(dot)).sum()) for _ in range(50)]
    assert min(sums) < 3
    assert max(sums) > 6


def test_augmentations_fill_each_other_in() -> None:
    mine = Augmentation(rotation=0.0, zoom=0.2)
    assert mine.over(Augmentation(rotation=10.0, translation=0.1)) == Augmentation(
        rotation=0.0, zoom=0.2, translation=0.1
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.9, 0.5)},
        {"crop_scale": (0.5, 1.5)},
        {"crop_ratio": (2.0, 1.0)},
        {"horizontal_flip": 1.5},
        {"rotation": -5.0},
        {"translation": float("nan")},
        {"zoom": 1.0},
    ],
)
def test_impossible_augmentations_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is .*, expected"):
        Augmentation(**bad)


def test_seeded_draws_depend_on_the_whole_key_and_leave_no_trace() -> None:
    def draw(*key: int) -> float:
        with seeded(*key):
            return float(torch.rand(()))

    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1), (0, 0, 2), (12, 3, 4), (1, 23, 4)]
    assert len({draw(*key) for key in keys}) == len(keys)
    assert draw(3, 4, 5) == draw(3, 4, 5)
    before = torch.get_rng_state()
    draw(1, 2, 3)
    with pytest.raises(ZeroDivisionError), seeded(1):
        _ = 1 / 0
    assert torch.equal(before, torch.get_rng_state())


def test_the_transform_can_be_sent_to_workers() -> None:
    preprocess = ImagePreprocess(size=(8, 8), mean=(0.5,) * 3, std=(0.25,) * 3)
    transform = train_transform(preprocess, Augmentation(rotation=5, crop_scale=(0.5, 1), horizontal_flip=0.5))
    with seeded(1):
        here = transform(NOISE)
    with seeded(1):
        assert torch.equal(pickle.loads(pickle.dumps(transform))(NOISE), here)
