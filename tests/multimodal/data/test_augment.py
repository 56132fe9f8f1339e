"""Random changes to training images: what each does, and that a sample's draws depend on its key alone."""

import pickle
from collections import Counter

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


def test_a_border_lets_the_crop_move() -> None:
    preprocess = ImagePreprocess(size=(8, 8), mean=(0.0,), std=(1.0,))
    ramp = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    crop, plain = train_transform(preprocess, Augmentation(crop_padding=2)), eval_transform(preprocess)(ramp)
    mirrored = np.pad(plain[0].numpy(), 2, mode="reflect")
    windows = {mirrored[y : y + 8, x : x + 8].tobytes() for y in range(5) for x in range(5)}
    assert {crop(ramp)[0].numpy().tobytes() for _ in range(300)} == windows
    with pytest.raises(ValueError, match="crop_padding is 8, expected less than the image's side, 8"):
        train_transform(preprocess, Augmentation(crop_padding=8))


def test_rand_augment_is_stronger_by_number_and_strength() -> None:
    preprocess = ImagePreprocess(size=(30, 30), mean=(0.5,) * 3, std=(0.25,) * 3)
    plain = eval_transform(preprocess)(NOISE)

    def change(*setting: int) -> float:
        transform = train_transform(preprocess, Augmentation(rand_augment=setting))
        return float(np.mean([float((transform(NOISE) - plain).abs().mean()) for _ in range(100)]))

    assert change(0, 30) == 0
    assert change(1, 3) < change(1, 20) < change(3, 20)


def test_three_augment_is_one_of_three() -> None:
    preprocess = ImagePreprocess(size=(30, 30), mean=(0.0,) * 3, std=(1.0,) * 3)
    plain, transform = eval_transform(preprocess)(NOISE), train_transform(preprocess, Augmentation(three_augment=True))
    kinds = Counter()
    for _ in range(300):
        image = transform(NOISE)
        solarized = torch.where(plain >= 128 / 255, 1 - plain, plain)
        if torch.equal(image[0], image[1]) and torch.equal(image[0], image[2]):
            kinds["grey"] += 1
        elif torch.allclose(image, solarized, atol=1e-6):
            kinds["solarized"] += 1
        else:
            assert image.std() <= plain.std()
            kinds["blurred"] += 1
    assert all(70 < kinds[kind] < 130 for kind in ("grey", "solarized", "blurred"))


def test_color_jitter_changes_brightness_by_at_most_its_share() -> None:
    preprocess = ImagePreprocess(size=(4, 4), mean=(0.0,) * 3, std=(1.0,) * 3)
    transform = train_transform(preprocess, Augmentation(color_jitter=0.3))
    flat = Image.new("RGB", (4, 4), (100, 100, 100))  # whose contrast and saturation are nil
    levels = [float(transform(flat).mean()) * 255 for _ in range(200)]
    assert 69 <= min(levels) < 80
    assert 120 < max(levels) <= 131


def test_a_rectangle_is_erased_by_noise_of_normalised_values() -> None:
    preprocess = ImagePreprocess(size=(32, 32), mean=(0.2,) * 3, std=(0.1,) * 3)
    flat = Image.new("RGB", (32, 32), (255, 255, 255))
    transform = train_transform(preprocess, Augmentation(erasing=0.5))
    shares, noise = [], []
    for _ in range(200):
        image = transform(flat)
        erased = (image - 8).abs() > 1e-4
        shares.append(float(erased.float().mean()))
        noise.append(image[erased])
    assert 70 < sum(share > 0 for share in shares) < 130
    assert all(share == 0 or 0.01 < share < 0.36 for share in shares)
    assert abs(float(torch.cat(noise).mean())) < 0.02
    assert abs(float(torch.cat(noise).std()) - 1) < 0.02


@pytest.mark.parametrize("side", [2, 8, 30])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_at_once_on_grey_and_tiny_images(channels: int, side: int) -> None:
    preprocess = ImagePreprocess(size=(side, side), mean=(0.5,) * channels, std=(0.25,) * channels)
    everything = Augmentation(
        crop_padding=1,
        horizontal_flip=0.5,
        rotation=10.0,
        rand_augment=(2, 30),
        three_augment=True,
        color_jitter=0.3,
        erasing=0.5,
    )
    transform = train_transform(preprocess, everything)
    image = NOISE.convert("L" if channels == 1 else "RGB").resize((side, side))
    for index in range(100):
        with seeded(0, 0, index):
            changed = transform(image)
        assert changed.shape == (channels, side, side)
        assert changed.isfinite().all()
        with seeded(0, 0, index):
            assert torch.equal(transform(image), changed)


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
        {"crop_padding": -1},
        {"crop_padding": 4, "crop_scale": (0.5, 1.0)},
        {"rand_augment": (-1, 5)},
        {"rand_augment": (2, 31)},
        {"color_jitter": 1.5},
        {"erasing": -0.1},
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
