"""Tables, folders and corpora of recordings: what is used, and what is left out and named."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from tasks.whisper.samples import Recording
from tasks.whisper.sources import (
    Limits,
    TableOptions,
    read_folder,
    read_librispeech,
    read_speech_commands,
    read_table,
)
from tests.tasks.whisper.spoken import RATE, write, write_table

LIMITS = Limits(0.01, 2.0)


def read(root: Path, text: str | bytes, name: str = "t.tsv", **options: Any) -> dict[str, list[Recording]]:
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(root, TableOptions(**options), LIMITS)


def shown(found: dict[str, list[Recording]]) -> dict[str, dict[str, str]]:
    return {split: {one.name: one.text for one in some} for split, some in found.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Files a.wav to d.wav, and sub/e.wav."""
    for name in ("a", "b", "c", "d", "sub/e"):
        write(tmp_path / "data" / f"{name}.wav")
    write(tmp_path / "secret.wav")
    return tmp_path / "data"


def test_a_table_in_each_form(root: Path) -> None:
    expected = {"train": {"a.wav": 'say "a", or b', "sub/e.wav": "你好 مرحبا"}}
    assert shown(read(root, 'file\ttext\na.wav\tsay "a", or b\nsub/e.wav\t 你好  مرحبا \n')) == expected
    (root / "t.tsv").unlink()
    csv = '\ufefffile,text\na.wav,"say ""a"", or b"\nsub/e.wav,你好 مرحبا\n'
    assert shown(read(root, csv, "t.csv")) == expected
    (root / "t.csv").unlink()
    rows = [{"file": name, "text": text, "n": 3} for name, text in expected["train"].items()]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=index == 0) for index, row in enumerate(rows))
    assert shown(read(root, lines, "t.jsonl")) == expected


def test_lengths_are_those_of_the_files(root: Path) -> None:
    (one,) = read(root, "file\ttext\na.wav\tx\n")["train"]
    assert one.seconds == 0.5
    assert one.file == str(root / "a.wav")


def test_bad_rows_are_named_in_one_line_and_left_out(root: Path) -> None:
    (root / "empty.wav").write_bytes(b"")
    (root / "film.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(100))
    write(root / "none.wav", 0)
    write(root / "long.wav", 3)
    write(root / "one.wav", 1 / RATE)
    rows = [
        *("a.wav\t \t", "b.wav\twith\ta tab\tin it", "gone.wav\tx", "../secret.wav\tx", "/etc/passwd\tx", "\tx"),
        *("c.wav\tgood", "c.wav\tagain", "none.wav\tx", "long.wav\tx", "one.wav\tx", "empty.wav\tx"),
    ]
    with pytest.warns(UserWarning, match="rows left out") as told:
        found = read(root, "file\ttext\tother\n" + "\n".join(rows) + "\n")
    assert shown(found) == {"train": {"c.wav": "good"}}
    (line,) = [str(one.message) for one in told]
    assert line.startswith(
        f"{root / 't.tsv'}: 11 of 12 rows left out: row 2: no text of a.wav; row 3: more cells than "
    )
    assert line.endswith("and 6 more")
    problems = {
        "../secret.wav": f"../secret.wav lies outside of {root}",
        "/etc/passwd": f"/etc/passwd lies outside of {root}",
        "gone.wav": "no such file gone.wav",
        "": "no file",
        "none.wav": "0 s, expected at least a frame of 0.01 s",
        "one.wav": "0.000125 s, expected at least a frame of 0.01 s",
        "long.wav": "3.0 s, expected at most 2 s (model.audio_context)",
        "empty.wav": "the file is empty, expected an audio file",
    }
    for name, problem in problems.items():
        with pytest.raises(ValueError, match=re.escape(f"t.tsv: no recording with its text (row 2: {problem})")):
            read(root, f"file\ttext\n{name}\tx\n")
    with pytest.warns(UserWarning, match=r"row 3: c\.wav is in row 2 already"):
        read(root, "file\ttext\nc.wav\tgood\nc.wav\tagain\n")
    with pytest.raises(ValueError, match=r"row 2: (soundfile cannot read it|neither soundfile nor FFmpeg)"):
        read(root, "file\ttext\nfilm.mp4\tx\n")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("file\ttext\na.wav\tGr\xfc\xdfe\n".encode("latin-1"), "t.tsv", "can't decode byte 0xfc"),
        ("file\ttranscript\na.wav\tx\n", "t.tsv", "no column 'text', it has file, transcript; expected data.table."),
        ('{"file": "a.wav"}\n', "t.jsonl", "row 1: no 'text', it has file; expected data.table.file_column"),
        ("{file: a.wav}\n", "t.jsonl", "row 1: Expecting property name"),
        ("[1]\n", "t.jsonl", "row 1: '[1]', expected a JSON object"),
        ("file\ttext\tsplit\na.wav\tx\tdev\n", "t.tsv", "row 2: split is 'dev', expected train, val, test"),
    ],
)
def test_a_table_that_is_none_is_one_line(root: Path, text: str | bytes, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(root, text, name)
    assert "\n" not in str(error.value)
    assert str(root / name) in str(error.value)


def test_rows_are_chosen_and_held_out_by_a_column(root: Path) -> None:
    text = "file\ttext\tspeaker\tlang\na.wav\ta\tann\ten\nb.wav\tb\tbob\ten\nc.wav\tc\tann\tde\nd.wav\td\tbob\tde\n"
    assert shown(read(root, text, test="speaker=bob")) == {
        "train": {"a.wav": "a", "c.wav": "c"},
        "test": {"b.wav": "b", "d.wav": "d"},
    }
    assert shown(read(root, text, where="lang=de", test="speaker=bob")) == {
        "train": {"c.wav": "c"},
        "test": {"d.wav": "d"},
    }
    with pytest.raises(ValueError, match="no column 'age', it has file, text, speaker, lang"):
        read(root, text, where="age=3")
    with pytest.raises(ValueError, match=r"^data.table.test is '=bob', expected COLUMN=VALUE$"):
        TableOptions(test="=bob")


def test_a_column_split_is_kept(root: Path) -> None:
    text = "file\ttext\tsplit\na.wav\ta\ttrain\nb.wav\tb\tval\nc.wav\tc\ttest\n"
    assert shown(read(root, text)) == {"train": {"a.wav": "a"}, "val": {"b.wav": "b"}, "test": {"c.wav": "c"}}


def test_a_folder_of_audio_beside_texts(tmp_path: Path) -> None:
    for split, name in (("train", "x/a"), ("train", "b"), ("val", "c")):
        write(tmp_path / split / f"{name}.wav")
        (tmp_path / split / f"{name}.txt").write_text(f"says {name}\n")
    write(tmp_path / "train/d.wav")
    write(tmp_path / "train/e.wav")
    (tmp_path / "train/e.txt").write_bytes(b"\xff\xfe")
    with pytest.warns(
        UserWarning, match=r"2 of 5 recordings left out: train/d\.wav: no d\.txt beside it; train/e\.wav"
    ):
        found = read_folder(tmp_path, LIMITS)
    assert shown(found) == {
        "train": {"train/b.wav": "says b", "train/x/a.wav": "says x/a"},
        "val": {"val/c.wav": "says c"},
    }
    assert set(shown(read_folder(tmp_path / "val", LIMITS))) == {"train"}


def test_librispeech(tmp_path: Path) -> None:
    for part, speaker in (("train-clean-100", 1), ("dev-clean", 2), ("test-clean", 3)):
        folder = tmp_path / "LibriSpeech" / part / str(speaker) / "7"
        folder.mkdir(parents=True)
        soundfile.write(folder / f"{speaker}-7-0000.flac", np.zeros(16000), 16000)
        (folder / f"{speaker}-7.trans.txt").write_text(f"{speaker}-7-0000 SPEAKER {speaker}\n")
    found = read_librispeech(tmp_path, LIMITS)
    assert {split: [one.text for one in some] for split, some in found.items()} == {
        "train": ["SPEAKER 1"],
        "val": ["SPEAKER 2"],
        "test": ["SPEAKER 3"],
    }
    assert found["train"][0].seconds == 1.0
    folder = tmp_path / "LibriSpeech/train-clean-100/1/7"
    soundfile.write(folder / "1-7-0001.flac", np.zeros(16000), 16000)  # of which the texts have none
    with pytest.warns(UserWarning, match=r"1 of 4 recordings left out: .*1-7-0001"):
        assert shown(read_librispeech(tmp_path, LIMITS)) == shown(found)
    with pytest.raises(ValueError, match="none of its recordings there, expected LibriSpeech with folders such as"):
        read_librispeech(tmp_path / "LibriSpeech", LIMITS)


def test_speech_commands(tmp_path: Path) -> None:
    base = tmp_path / "SpeechCommands/speech_commands_v0.02"
    names = [f"{word}/{speaker}_nohash_0.wav" for word in ("yes", "no") for speaker in ("1a", "2b", "3c")]
    for name in names:
        write(base / name)
    write(base / "_background_noise_/hum.wav")
    (base / "validation_list.txt").write_text("yes/2b_nohash_0.wav\nno/2b_nohash_0.wav\n")
    (base / "testing_list.txt").write_text("yes/3c_nohash_0.wav\n")
    found = read_speech_commands(tmp_path, LIMITS)
    assert {split: sorted(one.text for one in some) for split, some in found.items()} == {
        "train": ["no", "no", "yes"],
        "val": ["no", "yes"],
        "test": ["yes"],
    }
    with pytest.raises(ValueError, match="none of its recordings there, expected SpeechCommands"):
        read_speech_commands(base, LIMITS)


def test_the_helper_writes_what_is_read(tmp_path: Path) -> None:
    write_table(tmp_path, {"a.wav": "one", "b.wav": "two"}, b=1.5)
    (a, b) = read_table(tmp_path, TableOptions(), LIMITS)["train"]
    assert (a.seconds, b.seconds) == (0.5, 1.5)
