"""Decoding of every kind of file, damaged ones included, and preprocessing against timm's."""

import io
import json
import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from multimodal.data import (
    ImagePreprocess,
    eval_transform,
    list_images,
    load_image,
    natural_key,
)
from multimodal.data.image import image_size

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return values[..., 0] if channels == 1 else values


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    with Image.open(path) as again:
        assert again.mode == image.mode, f"the format changed {image.mode} to {again.mode}"
    return path


# ------------------------------------------------------------------------------------------------------- modes


def test_bilevel(tmp_path: Path) -> None:
    bits = np.array([[0, 255], [255, 0]], dtype=np.uint8)
    path = saved(Image.fromarray(bits).convert("1"), tmp_path / "a.png")
    assert np.array_equal(load_image(path, 1), bits)
    assert np.array_equal(load_image(path, 3), np.repeat(bits[..., None], 3, axis=2))


def test_grey_and_colour(tmp_path: Path) -> None:
    grey = noise(5, 7, 1)
    path = saved(Image.fromarray(grey), tmp_path / "grey.png")
    assert load_image(path, 1).mode == "L"
    assert np.array_equal(load_image(path, 1), grey)
    assert np.array_equal(load_image(path, 3), np.repeat(grey[..., None], 3, axis=2))
    colour = noise(5, 7)
    path = saved(Image.fromarray(colour), tmp_path / "colour.png")
    assert np.array_equal(load_image(path, 3), colour)
    luma = colour @ np.array([0.299, 0.587, 0.114])
    assert np.abs(np.asarray(load_image(path, 1)) - luma).max() <= 1


def test_alpha_is_composited_on_white(tmp_path: Path) -> None:
    pixels = noise(6, 6, 4)
    path = saved(Image.fromarray(pixels, "RGBA"), tmp_path / "a.png")
    alpha = pixels[..., 3:] / 255
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(np.asarray(load_image(path)) - expected).max() <= 1
    pixels = noise(6, 6, 2)
    path = saved(Image.fromarray(pixels, "LA"), tmp_path / "b.png")
    alpha = pixels[..., 1] / 255
    assert np.abs(np.asarray(load_image(path, 1)) - (pixels[..., 0] * alpha + 255 * (1 - alpha))).max() <= 1


def test_palette_with_and_without_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putdata([0, 1])
    path = saved(image, tmp_path / "a.png")
    assert np.asarray(load_image(path)).tolist() == [[[10, 20, 30], [200, 100, 50]]]
    path = saved(image, tmp_path / "one.png", transparency=1)
    assert np.asarray(load_image(path)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    path = saved(image, tmp_path / "bytes.png", transparency=bytes([0, 255]))
    assert np.asarray(load_image(path)).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    path = saved(image, tmp_path / "a.gif", transparency=0)
    assert np.asarray(load_image(path)).tolist() == [[[255, 255, 255], [200, 100, 50]]]


def test_a_transparent_colour(tmp_path: Path) -> None:
    path = saved(
        Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)), tmp_path / "a.png", transparency=(1, 2, 3)
    )
    assert np.asarray(load_image(path)).tolist() == [[[255, 255, 255], [4, 5, 6]]]
    path = saved(Image.fromarray(np.array([[7, 8]], np.uint8)), tmp_path / "b.png", transparency=7)
    assert np.asarray(load_image(path, 1)).tolist() == [[255, 8]]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_grey_is_scaled_by_its_range(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 255, 257], [32768, 65278, 65535]], dtype=np.uint16)
    path = saved(Image.fromarray(values), tmp_path / f"a.{suffix}")
    with Image.open(path) as image:
        assert image.mode == "I;16"
    assert np.asarray(load_image(path, 1)).tolist() == [[0, 1, 1], [128, 254, 255]]
    assert np.asarray(load_image(path, 3))[1, 0].tolist() == [128, 128, 128]


def test_sixteen_bit_grey_with_a_transparent_value() -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\x00" + struct.pack(">HH", 1000, 0)))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"tRNS", struct.pack(">H", 1000)) + pixels + chunk(b"IEND", b"")
    assert np.asarray(load_image(data, 1)).tolist() == [[255, 0]]


def test_32_bit_and_floating_point(tmp_path: Path) -> None:
    path = saved(Image.fromarray(np.array([[0, 65535]], np.int32)), tmp_path / "a.tif")
    assert np.asarray(load_image(path, 1)).tolist() == [[0, 255]]
    path = saved(Image.fromarray(np.array([[0, 70000]], np.int32)), tmp_path / "b.tif")
    with pytest.raises(ValueError, match=r"b\.tif: 32-bit values from 0 to 70000, expected 0 to 65535"):
        load_image(path)
    path = saved(Image.fromarray(np.array([[0, 0.5, 1]], np.float32)), tmp_path / "c.tif")
    assert np.asarray(load_image(path, 1)).tolist() == [[0, 128, 255]]
    for name, bad in (("d", 1.5), ("e", float("nan")), ("f", -0.1)):
        path = saved(Image.fromarray(np.array([[0, bad]], np.float32)), tmp_path / f"{name}.tif")
        with pytest.raises(ValueError, match=rf"{name}\.tif: floating-point values .* expected 0 to 1"):
            load_image(path)


def test_cmyk(tmp_path: Path) -> None:
    path = saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), tmp_path / "red.jpg", quality=100)
    red, green, blue = np.asarray(load_image(path)).reshape(-1, 3).mean(axis=0)
    assert red > 250
    assert green < 5
    assert blue < 5
    assert np.abs(np.asarray(load_image(path, 1), float) - 76).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    upright = noise(2, 3)
    # How a camera that is held so stores the upright picture.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    path = saved(Image.fromarray(np.ascontiguousarray(stored)), tmp_path / "a.png", exif=exif)
    assert np.array_equal(load_image(path), upright)


def test_broken_exif_does_not_spoil_whole_pixels(tmp_path: Path) -> None:
    path = saved(Image.fromarray(noise(8, 8)), tmp_path / "a.jpg", exif=b"Exif\x00\x00nonsense")
    assert load_image(path).size == (8, 8)


def test_the_size_by_the_header_alone(tmp_path: Path) -> None:
    path = saved(Image.fromarray(noise(8, 5)), tmp_path / "a.jpg")
    size = Image.open(path).size[::-1]
    path.write_bytes(path.read_bytes()[:-40])
    assert image_size(path) == size
    with pytest.raises(ValueError, match=r"b.jpg: no such file"):
        image_size(tmp_path / "b.jpg")


def test_sources_and_animations(tmp_path: Path) -> None:
    frames = [Image.new("L", (4, 4), value) for value in (10, 200)]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:])
    first = np.full((4, 4), 10)
    assert np.array_equal(load_image(path, 1), first)
    assert np.array_equal(load_image(str(path), 1), first)
    assert np.array_equal(load_image(path.read_bytes(), 1), first)
    assert np.array_equal(load_image(io.BytesIO(path.read_bytes()), 1), first)
    with path.open("rb") as file:
        assert np.array_equal(load_image(file, 1), first)


# -------------------------------------------------------------------------------------------------- bad inputs


def bomb(side: int) -> bytes:
    """A PNG of side × side white pixels, some hundred kilobytes small."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packer = zlib.compressobj(1)
    row = b"\x00" + b"\xff" * ((side + 7) // 8)
    rows = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(30_000))
    assert path.stat().st_size < 1e6
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"bomb\.png: 900000000 pixels, expected at most 178956970$"):
        load_image(path)


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_truncated_jpeg_is_named(tmp_path: Path, kept: float, progressive: bool) -> None:
    path = saved(Image.fromarray(noise(64, 64)), tmp_path / "a.jpg", quality=95, progressive=progressive)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ValueError, match=r"a\.jpg: .*expected") as caught:
        load_image(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("this is no picture\n" * 5)
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "postscript.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n")
    for name, found in (
        ("text.jpg", "no known image format"),
        ("empty.png", "0 bytes"),
        ("folder.png", "a folder"),
        ("absent.png", "no such file"),
        ("pipe.png", "no regular file"),
        ("postscript.png", "no known image format"),
    ):
        with pytest.raises(ValueError, match=f"^{tmp_path / name}: {found}.*, expected an image"):
            load_image(tmp_path / name)
    for data in (b"", b"GIF89a"):
        with pytest.raises(ValueError, match=r"image data: .*, expected "):
            load_image(data)


def error_of(data: bytes) -> str | None:
    try:
        load_image(data)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")
def test_random_damage_is_always_one_line_of_valueerror() -> None:
    rng = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(noise(20, 20)).save(buffer, kind)
        for _ in range(60):
            data = bytearray(buffer.getvalue())
            for place in rng.integers(0, min(len(data), 120), 4):
                data[place] = rng.integers(256)
            message = error_of(bytes(data))
            assert message is None or (message.startswith("image data: ") and "\n" not in message)


def test_only_one_or_three_channels() -> None:
    with pytest.raises(ValueError, match="image channels 2"):
        load_image(b"", 2)


# --------------------------------------------------------------------------------------------------- transforms


SETTINGS = [
    {"size": (224, 224), "crop_pct": 0.875, "interpolation": "bicubic"},
    {"size": (224, 224), "crop_pct": 0.9, "interpolation": "bilinear"},
    {"size": (31, 31), "crop_pct": 0.95, "interpolation": "lanczos"},
    {"size": (32, 32), "crop_pct": 1.0, "interpolation": "nearest"},
    {"size": (224, 224), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "squash"},
    {"size": (64, 96), "crop_pct": 0.875, "interpolation": "bicubic"},
    {"size": (96, 64), "crop_pct": 1.0, "interpolation": "bilinear"},
    {"size": (96, 64), "crop_pct": 0.9, "interpolation": "bicubic", "crop_mode": "squash"},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(80, 80), (61, 90), (301, 200), (17, 33), (500, 60)])
def test_the_numbers_are_those_of_timm(settings: dict, shape: tuple[int, int]) -> None:
    image = Image.fromarray(noise(*shape))
    ours = eval_transform(ImagePreprocess(**settings, **IMAGENET))(image)
    assert torch.equal(ours, timm_transform(settings)(image))
    assert ours.shape == (3, *settings["size"])
    assert ours.dtype == torch.float32


def test_the_numbers_are_those_of_timm_on_photographs(shared: Path) -> None:
    photos = list_images(shared / "data" / "clothing80")[::60]
    assert len(photos) > 20
    for settings in SETTINGS:
        ours, theirs = eval_transform(ImagePreprocess(**settings, **IMAGENET)), timm_transform(settings)
        for photo in photos:
            with Image.open(photo) as image:
                assert torch.equal(ours(load_image(photo)), theirs(image.convert("RGB")))


def timm_transform(settings: dict) -> object:
    settings = {**settings, "input_size": (3, *settings["size"])}
    del settings["size"]
    return timm.data.create_transform(**settings, **IMAGENET, is_training=False)


def test_grey_and_degenerate_sizes() -> None:
    preprocess = ImagePreprocess(size=(8, 8), mean=(0.5,), std=(0.25,))
    assert torch.equal(eval_transform(preprocess)(Image.new("L", (8, 8), 255)), torch.full((1, 8, 8), 2.0))
    assert eval_transform(preprocess)(Image.new("L", (1, 1))).shape == (1, 8, 8)
    assert eval_transform(preprocess)(Image.new("L", (1, 500))).shape == (1, 8, 8)
    with pytest.raises(ValueError, match=r"3 channels: expected 1"):
        eval_transform(preprocess)(Image.new("RGB", (8, 8)))


def test_a_narrow_image_does_not_grow_without_bound() -> None:
    image = Image.new("RGB", (1, 30_000))
    with pytest.raises(ValueError, match=r"30000 high and 1 wide is too narrow.*expected"):
        eval_transform(ImagePreprocess(size=(224, 224), **IMAGENET))(image)
    assert eval_transform(ImagePreprocess(size=(8, 8), crop_mode="squash", **IMAGENET))(image).shape == (3, 8, 8)


def test_the_record_is_plain_data_and_comes_back() -> None:
    preprocess = ImagePreprocess(size=(64, 96), crop_pct=0.9, crop_mode="squash", interpolation="lanczos", **IMAGENET)
    record = preprocess.to_dict()
    assert record == {
        "size": [64, 96],
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "lanczos",
        "crop_pct": 0.9,
        "crop_mode": "squash",
    }
    assert ImagePreprocess.from_dict(json.loads(json.dumps(record))) == preprocess
    assert preprocess.channels == 3
    with pytest.raises(ValueError, match="preprocess record has colour: expected crop_mode"):
        ImagePreprocess.from_dict({**record, "colour": 1})
    with pytest.raises(ValueError, match="preprocess record lacks mean, std"):
        ImagePreprocess.from_dict({"size": [8, 8]})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("size", (0, 8), "image size"),
        ("size", (8,), "image size"),
        ("mean", (0.5,), "mean has 1 values and std 3"),
        ("mean", (0.5, float("nan"), 0.5), "mean"),
        ("std", (0.5, 0.0, 0.5), "std"),
        ("interpolation", "cubic", "interpolation 'cubic': expected one of nearest, bilinear"),
        ("crop_pct", 0.0, "crop_pct"),
        ("crop_pct", 1.5, "crop_pct"),
        ("crop_mode", "border", "crop_mode 'border': expected one of center, squash"),
    ],
)
def test_impossible_settings_are_refused(field: str, value: object, message: str) -> None:
    settings = {"size": (8, 8), **IMAGENET, field: value}
    with pytest.raises(ValueError, match=message):
        ImagePreprocess(**settings)


def test_transforms_can_be_sent_to_workers() -> None:
    preprocess = ImagePreprocess(size=(8, 8), **IMAGENET)
    image = Image.fromarray(noise(20, 10))
    again = pickle.loads(pickle.dumps(eval_transform(preprocess)))
    assert torch.equal(again(image), eval_transform(preprocess)(image))


# -------------------------------------------------------------------------------------------------------- files


def test_natural_order() -> None:
    names = ["class10", "class2", "b", "a10b2", "a10b10", "a9", "1", "10", "2", "01"]
    expected = ["01", "1", "2", "10", "a9", "a10b2", "a10b10", "b", "class2", "class10"]
    assert sorted(names, key=natural_key) == expected


def test_list_images(tmp_path: Path) -> None:
    for name in ("10.png", "2.JPG", "sub/deep/3.webp", ".hidden.png", ".cache/4.png", "notes.txt", "5.png.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.symlink(tmp_path, tmp_path / "sub" / "loop")
    found = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert found == ["2.JPG", "10.png", "sub/deep/3.webp"]
