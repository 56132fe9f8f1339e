"""Tables of captions: which rows are used, which are named, and which captions are held out."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.clip.table import SUFFIXES, Record, TableOptions, by_caption, read_table
from tasks.table import find_table


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pictures a.png to e.png, and x/f.png."""
    folder = tmp_path / "pictures"
    (folder / "x").mkdir(parents=True)
    for at, name in enumerate(("a", "b", "c", "d", "e", "x/f")):
        Image.fromarray(np.full((8, 8, 3), 20 * at, np.uint8)).save(folder / f"{name}.png")
    (tmp_path / "secret.png").write_bytes((folder / "a.png").read_bytes())
    return folder


def read(root: Path, text: str, name: str = "captions.tsv", **options: Any) -> dict[str, list[Record]]:
    (root / name).write_text(text)
    return read_table(root / name, TableOptions(**options))


def shown(found: list[Record]) -> dict[str, tuple[str, ...]]:
    return {record.name: record.captions for record in found}


def test_rows_and_columns_of_one_file_add_up(root: Path) -> None:
    text = 'file\tcaption\tother\na.png\tone "dog\tein Hund\nb.png\ttwo\t\na.png\tone "dog\ta dog\n'
    assert shown(read(root, text)["train"]) == {"a.png": ('one "dog',), "b.png": ("two",)}
    both = read(root, text, caption_columns=("caption", "other"))["train"]
    assert shown(both) == {"a.png": ('one "dog', "ein Hund", "a dog"), "b.png": ("two",)}
    assert both[0].file == str(root / "a.png")


def test_a_csv_has_quotes_and_a_byte_order_mark(root: Path) -> None:
    text = '\ufefffile,caption\na.png,"red, round\nand ""big"""\nx/f.png,猫 🐈\n'
    assert shown(read(root, text, "c.csv")["train"]) == {"a.png": ('red, round\nand "big"',), "x/f.png": ("猫 🐈",)}


def test_a_column_split_is_kept(root: Path) -> None:
    found = read(root, "file\tcaption\tsplit\na.png\tx\ttrain\nb.png\ty\tval\nc.png\tz\ttest\n")
    assert {split: [record.name for record in records] for split, records in found.items()} == {
        "train": ["a.png"],
        "val": ["b.png"],
        "test": ["c.png"],
    }
    with pytest.raises(ValueError, match=r"captions\.tsv: row 2: split is 'dev', expected train, val, test"):
        read(root, "file\tcaption\tsplit\na.png\tx\tdev\n")


def test_bad_rows_are_named_and_never_trained_on(root: Path) -> None:
    text = "file\tcaption\na.png\t \nb.png\nnone.png\tx\n../secret.png\tx\n/etc/passwd\tx\n"
    text += "\tx\nd.png\tx\ty\nc.png\tgood\n"
    with pytest.warns(UserWarning, match="7 of 8 rows left out") as told:
        found = read(root, text)
    assert shown(found["train"]) == {"c.png": ("good",)}
    (message,) = [str(warning.message) for warning in told if "left out" in str(warning.message)]
    for part in (
        "row 2: no caption of a.png",
        "row 3: no caption of b.png",
        "row 4: no such file none.png",
        f"row 5: ../secret.png lies outside of {root}",
        "row 6: /etc/passwd lies outside",
        " and 2 more",
    ):
        assert part in message
    assert "\n" not in message


def test_files_are_chosen_by_a_pattern(root: Path) -> None:
    text = "file\tcaption\na.png\tone\nx/f.png\ttwo\nx/gone.png\t\n"
    with pytest.warns(UserWarning, match="1 of 2 rows left out: row 4: no such file x/gone.png"):
        assert shown(read(root, text, files="x/*")["train"]) == {"x/f.png": ("two",)}
    with pytest.raises(ValueError, match="no row with an image and a caption whose file matches 'y/\\*'"):
        read(root, text, files="y/*")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file\ttext\na.png\tx\n", "no column 'caption', it has file, text; expected data.table.file_column"),
        ("", "no column 'file', it has none"),
        ("file\tcaption\n", "no row with an image and a caption, expected at least one"),
        ("file\tcaption\n\xff\0", "captions.tsv"),
    ],
)
def test_what_is_no_table_is_named(root: Path, text: str, message: str) -> None:
    (root / "captions.tsv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as error:
        read_table(root / "captions.tsv", TableOptions())
    assert "\n" not in str(error.value)


def test_the_table_is_found_or_asked_for(root: Path) -> None:
    assert find_table(root, None, SUFFIXES, "captions") is None
    (root / "b.csv").touch()
    assert find_table(root, None, SUFFIXES, "captions") == root / "b.csv"
    (root / "a.tsv").touch()
    with pytest.raises(ValueError, match=r"2 tables \(a\.tsv, b\.csv\), expected one, or --data\.table\.path"):
        find_table(root, None, SUFFIXES, "captions")
    assert find_table(root, "a.tsv", SUFFIXES, "captions") == root / "a.tsv"
    for name, message in (("../x.tsv", "leads out of"), ("no.tsv", "no such file"), ("a.png", r"ends in '\.png'")):
        with pytest.raises(ValueError, match=message):
            find_table(root, name, SUFFIXES, "captions")


def test_a_caption_s_part_depends_on_nothing_but_the_caption() -> None:
    captions = [f"caption {number}" for number in range(2000)]
    parts = by_caption(captions, [0.1, 0.2], 0)
    assert sorted(chain(*parts)) == list(range(2000))
    assert [len(part) / 2000 for part in parts] == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    held_out = {captions[index] for index in parts[1]}
    some = captions[::3] * 2
    assert {some[index] for index in by_caption(some, [0.1, 0.2], 0)[1]} == held_out & set(some)
    assert {captions[index] for index in by_caption(captions, [0.1, 0.2], 1)[1]} != held_out
    assert by_caption(captions, [], 0) == [list(range(2000))]
