"""`multimodal search`."""

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tasks.clip.tiny_clip import image_features, text_features
from tests.tasks.commands import Run


def search(run: Run, *arguments: object) -> Any:
    return run("search", *arguments, "--checkpoint", "model.safetensors")


def test_images_are_ranked_by_similarity(run: Run, photos: list[str]) -> None:
    result = search(run, "a red car", "photos", "--json", "--batch-size", "2")
    found = {line["path"]: line["similarity"] for line in map(json.loads, result.out.splitlines())}
    expected = (image_features(photos) @ text_features(["a red car"]).T)[:, 0]
    assert result.code == 0
    assert list(found) == [photos[index] for index in expected.argsort(descending=True)]
    assert [found[path] for path in photos] == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_best_as_a_table(run: Run, photos: list[str]) -> None:
    everything = search(run, "a red car", "photos", "--csv")
    header, *rows = csv.reader(io.StringIO(everything.out))
    assert (header, len(rows)) == (["path", "similarity"], 5)
    lines = search(run, "a red car", "photos", "--top-k", "2").out.splitlines()
    assert [line.split()[1] for line in lines] == [row[0] for row in rows[:2]]
    assert [float(line.split()[0]) for line in lines] == pytest.approx([float(row[1]) for row in rows[:2]], abs=1e-4)


def test_equal_images_keep_their_order(run: Run, photos: list[str]) -> None:
    for path in photos:
        Image.new("RGB", (20, 20), "blue").save(path)
    assert [line.split()[1] for line in search(run, "x", "photos").out.splitlines()] == photos


def test_a_changed_image_is_seen_anew_whatever_its_time_and_size(run: Run, photos: list[str]) -> None:
    before = search(run, "a red car", "photos", "--json").out
    first, second = Path(photos[0]), Path(photos[1])
    for path in (first, second):  # of equal size, as bitmaps are
        Image.open(path).save(path.with_suffix(".bmp"))
        path.unlink()
    search(run, "a red car", "photos", "--json")
    one, two = first.with_suffix(".bmp"), second.with_suffix(".bmp")
    stat = one.stat()
    one.write_bytes(two.read_bytes())
    os.utime(one, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    lines = [json.loads(line) for line in search(run, "a red car", "photos", "--json").out.splitlines()]
    found = {line["path"]: line["similarity"] for line in lines}
    (second_before,) = (
        line["similarity"] for line in map(json.loads, before.splitlines()) if line["path"] == photos[1]
    )
    for path in ("photos/0.bmp", "photos/1.bmp"):
        assert found[path] == pytest.approx(second_before, abs=1e-5)


def test_images_that_are_gone_are_not_kept(run: Run, photos: list[str]) -> None:
    search(run, "a red car", "photos")
    kept = max(Path("multimodal/clip").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = kept.stat().st_size
    for path in photos[1:]:
        Path(path).unlink()
    Image.new("RGB", (8, 8)).save(photos[0])
    assert search(run, "a red car", "photos").code == 0
    assert kept.stat().st_size < size - 4 * 16 * 4


def test_what_cannot_be_read_is_named_and_the_rest_ranked(run: Run, photos: list[str]) -> None:
    Path(photos[2]).write_text("no image")
    result = search(run, "a red car", "photos", "nowhere.png", "--csv")
    assert (result.code, len(result.out.splitlines())) == (1, 5)
    assert [line.split(": ")[2] for line in result.err.splitlines()] == [photos[2], "nowhere.png"]


def test_a_sheet_of_the_best(run: Run, photos: list[str]) -> None:
    assert search(run, "a red car", "photos", "--sheet", "sheet.png", "--top-k", "3").code == 0
    assert Image.open("sheet.png").size == (3 * 168 + 8, 160 + 18 + 8 + 8)


def test_any_script_and_any_length(run: Run, photos: list[str]) -> None:
    lines = search(run, "一辆红色的汽车 🚗", "photos", "--json").out.splitlines()
    expected = (image_features(photos) @ text_features(["一辆红色的汽车 🚗"]).T)[:, 0]
    assert json.loads(lines[0])["similarity"] == pytest.approx(float(expected.max()), abs=1e-5)
    result = search(run, "word " * 300, "photos")
    assert result.code == 0
    assert "has more than the 77 tokens that the model reads" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([" ", "photos"], "the sentence is empty, expected what is looked for"),
        (["a red car", "empty"], "no image found in empty"),
        (["a red car", "photos", "--sheet", "no/where.png"], "--sheet no/where.png: no such folder"),
        (["a red car", "photos", "--device", "foo"], "--device foo: "),
    ],
)
def test_mistakes(run: Run, photos: list[str], arguments: list[str], message: str) -> None:
    Path("empty").mkdir()
    result = search(run, *arguments)
    assert result.error.startswith(message)
    assert (result.code, result.out) == (2, "")


def test_flags_may_stand_between_sentence_and_images(run: Run, photos: list[str]) -> None:
    flags = ["--checkpoint", "model.safetensors", "--csv"]
    orders = (
        ["a red car", *photos, *flags],
        ["a red car", *flags, *photos],
        [*flags, "a red car", *photos],
        ["a red car", photos[0], *flags, *photos[1:]],
    )
    outs = {run("search", *order).out for order in orders}
    assert len(outs) == 1
    assert len(outs.pop().splitlines()) == 6
