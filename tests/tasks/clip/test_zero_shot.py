"""`multimodal zero-shot`."""

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from multimodal import pretrained
from multimodal.models.clip import CLIP
from multimodal.pretrained.files import read_safetensors
from tests.tasks.clip.tiny_clip import checkpoint, image_features, label_features
from tests.tasks.commands import Run

LABELS = ["cat", "dog", "a red car"]
PLAIN = ["--labels", "cat, dog,a red car"]


def zero_shot(run: Run, *arguments: object) -> Any:
    return run("zero-shot", "--checkpoint", "model.safetensors", *arguments)


def said(run: Run, *arguments: object) -> dict[str, dict[str, float]]:
    """Probabilities by path and label."""
    result = zero_shot(run, *arguments, "--json", "--top-k", "99")
    assert result.code == 0, result.err
    lines = map(json.loads, result.out.splitlines())
    return {line["path"]: {one["label"]: one["probability"] for one in line["predictions"]} for line in lines}


def matrix(answers: dict[str, dict[str, float]], labels: list[str]) -> Tensor:
    return torch.tensor([[row[label] for label in labels] for row in answers.values()])


@pytest.fixture
def no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text can be embedded."""

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("a text is embedded")

    monkeypatch.setattr(CLIP, "encode_text", refuse)


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images are embedded at a time."""
    counts: list[int] = []
    original = CLIP.encode_image

    def counted(self: CLIP, images: Tensor) -> Tensor:
        counts.append(len(images))
        return original(self, images)

    monkeypatch.setattr(CLIP, "encode_image", counted)
    return counts


def test_probabilities_are_what_the_model_says(run: Run, photos: list[str]) -> None:
    answers = said(run, *photos, *PLAIN, "--batch-size", "2")
    logits = torch.tensor(3.0).exp() * image_features(photos) @ label_features(LABELS, ["a photo of a {}."]).T
    assert list(answers) == photos
    assert_close(matrix(answers, LABELS), logits.softmax(dim=-1), atol=1e-5, rtol=0)
    assert len({max(row, key=row.__getitem__) for row in answers.values()}) > 1, "images should differ"
    for row in answers.values():
        assert list(row.values()) == sorted(row.values(), reverse=True)


def test_templates_are_averaged_as_features(run: Run, photos: list[str]) -> None:
    templates = ["{}", "a drawing of a {}, seen from far away, in the rain.", "{} {}"]
    flags = [flag for template in templates for flag in ("--template", template)]
    answers = said(run, "photos", *PLAIN, *flags)
    logits = torch.tensor(3.0).exp() * image_features(photos) @ label_features(LABELS, templates).T
    assert_close(matrix(answers, LABELS), logits.softmax(dim=-1), atol=1e-5, rtol=0)


def test_with_a_bias_each_label_is_judged_by_itself(run: Run, photos: list[str]) -> None:
    pretrained.save("model.safetensors", checkpoint(logit_bias=-5.0))
    answers = said(run, "photos", *PLAIN)
    logits = torch.tensor(3.0).exp() * image_features(photos) @ label_features(LABELS, ["a photo of a {}."]).T - 5.0
    assert_close(matrix(answers, LABELS), logits.sigmoid(), atol=1e-5, rtol=0)
    result = zero_shot(run, "photos", "--labels", "cat")
    assert (result.code, result.err) == (0, "")


def test_a_table(run: Run, photos: list[str]) -> None:
    result = zero_shot(run, photos[0], *PLAIN, "--top-k", "2")
    path, *rows = result.out.splitlines()
    assert (result.code, path, len(rows)) == (0, photos[0], 2)
    for row in rows:
        percent, label = row.split(maxsplit=1)
        assert percent.endswith("%")
        assert label in LABELS


def test_a_table_with_commas_and_quotation_marks(run: Run, photos: list[str]) -> None:
    Path("labels.txt").write_text('a cat, asleep\nthe "best" dog\n', encoding="utf-8")
    Path("photos, more").mkdir()
    shutil.copy(photos[0], "photos, more/a,b.png")
    result = zero_shot(run, "photos, more", *photos[1:3], "--labels-file", "labels.txt", "--csv")
    header, *rows = csv.reader(io.StringIO(result.out))
    assert (result.code, header) == (0, ["path", "label", "probability"])
    assert [row[0] for row in rows] == [path for path in ("photos, more/a,b.png", *photos[1:3]) for _ in range(2)]
    assert {row[1] for row in rows} == {"a cat, asleep", 'the "best" dog'}
    assert sum(float(row[2]) for row in rows) == pytest.approx(3, abs=1e-4)


def test_a_threshold_answers_none_of_these(run: Run, photos: list[str]) -> None:
    best = {path: max(row.values()) for path, row in said(run, "photos", *PLAIN).items()}
    least = sorted(best.values())[2]
    answers = said(run, "photos", *PLAIN, "--threshold", f"{least - 1e-6:.6f}")
    assert {path for path, row in answers.items() if row} == {path for path, value in best.items() if value >= least}
    assert all(value >= least - 2e-6 for row in answers.values() for value in row.values())
    assert zero_shot(run, photos[0], *PLAIN, "--threshold", "1").out == (
        "photos/0.png\n  none of these: no label has a probability of at least 1\n"
    )
    out = zero_shot(run, photos[0], *PLAIN, "--threshold", "1", "--csv").out
    assert out == "path,label,probability\nphotos/0.png,none of these,\n"


# ------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no labels, expected --labels A,B,… or --labels-file FILE"),
        (["--labels", ""], "--labels: no label, expected at least one"),
        (["--labels", " , "], "--labels: no label, expected at least one"),
        (["--labels", "cat,,dog"], "--labels: label 2 of 3 is empty, expected a word between commas"),
        (["--labels", "cat,dog, Cat"], "--labels: labels 1 and 3 are both 'Cat', expected each label once"),
        (["--labels-file", "empty.txt"], "--labels-file empty.txt: no label, expected at least one"),
        (
            ["--labels-file", "nowhere.txt"],
            "--labels-file nowhere.txt: No such file or directory, expected a text file",
        ),
        (["--labels-file", "photos/0.png"], "--labels-file photos/0.png: not UTF-8"),
        ([*PLAIN, "--template", "a photo"], "--template 'a photo': no {} in it, expected one in place of the label"),
        ([*PLAIN, "--sheet", "photos"], "--sheet photos: a folder, expected a file"),
        ([*PLAIN, "--sheet", "photos/0.png"], "--sheet photos/0.png: is read by this command, expected another file"),
        ([*PLAIN, "--confusion", "c.png"], "--confusion is for --evaluate"),
        ([*PLAIN, "--threshold", "2"], "argument --threshold: '2' is not a number from 0 to 1"),
        ([*PLAIN, "--json", "--csv"], "argument --csv: not allowed with argument --json"),
        ([*PLAIN, "--labels-file", "empty.txt"], "argument --labels-file: not allowed with argument --labels"),
    ],
)
def test_a_mistake_is_told_before_anything_is_predicted(
    run: Run, photos: list[str], flags: list[str], message: str
) -> None:
    Path("empty.txt").write_text("\n \n")
    result = zero_shot(run, "photos", *flags)
    assert result.error.startswith(message)
    assert (result.code, result.out) == (2, "")


def test_a_file_of_labels(run: Run, photos: list[str]) -> None:
    Path("labels.txt").write_bytes("\ufeffcat\r\n\r\n dog \r\na red car".encode())
    assert said(run, "photos", "--labels-file", "labels.txt") == said(run, "photos", *PLAIN)


def test_ten_thousand_labels(run: Run, photos: list[str]) -> None:
    labels = [f"{number}" for number in range(10_000)]
    Path("labels.txt").write_text("\n".join(labels))
    result = zero_shot(run, photos[0], "--labels-file", "labels.txt", "--template", "{}", "--json")
    logits = torch.tensor(3.0).exp() * image_features(photos[:1]) @ label_features(labels[:50], ["{}"]).T
    predictions = json.loads(result.out)["predictions"]
    assert len(predictions) == 3
    # The softmax goes over all of them: ratios of probabilities are those of a part.
    answers = said(run, photos[0], "--labels", ",".join(labels[:50]), "--template", "{}")
    assert_close(matrix(answers, labels[:50]), logits.softmax(dim=-1), atol=1e-5, rtol=0)


def test_a_label_that_is_too_long_is_cut_and_named(run: Run, photos: list[str]) -> None:
    long = " ".join(f"word{number}" for number in range(300))
    result = zero_shot(run, photos[0], "--labels", f"cat,{long}", "--json")
    assert result.code == 0
    assert {one["label"] for one in json.loads(result.out)["predictions"]} == {"cat", long}
    (line,) = result.err.splitlines()
    assert line.startswith("multimodal: warning: label 'word0 word1")
    assert line.endswith("has more than the 77 tokens that the model reads, the end is left out")


def test_labels_of_any_script(run: Run, photos: list[str]) -> None:
    labels = ["🐈", "一只狗", "Größe {x} & <b>", "👩‍🚀👩‍🚀"]
    answers = said(run, "photos", "--labels", ",".join(labels))
    logits = torch.tensor(3.0).exp() * image_features(photos) @ label_features(labels, ["a photo of a {}."]).T
    assert_close(matrix(answers, labels), logits.softmax(dim=-1), atol=1e-5, rtol=0)
    result = zero_shot(run, photos[0], "--labels", ",".join(labels), "--sheet", "sheet.png")
    assert (result.code, result.err) == (0, "")


def test_a_single_label_is_remarked_upon(run: Run, photos: list[str]) -> None:
    result = zero_shot(run, photos[0], "--labels", "cat")
    assert (result.code, result.out) == (0, "photos/0.png\n  100.00%  cat\n")
    assert "'cat' is the only label, so that its probability is 1" in result.err


# --------------------------------------------------------------------------------------------------- what is kept


def test_labels_are_embedded_once(run: Run, photos: list[str], request: pytest.FixtureRequest) -> None:
    first = said(run, "photos", *PLAIN)
    request.getfixturevalue("no_text")
    assert said(run, "photos", *PLAIN) == first
    for other in (["--labels", "cat,dog"], ["--labels", "dog,cat,a red car"], [*PLAIN, "--template", "{}"]):
        with pytest.raises(AssertionError, match="a text is embedded"):
            zero_shot(run, "photos", *other)
    pretrained.save("model.safetensors", checkpoint(seed=1))
    with pytest.raises(AssertionError, match="a text is embedded"):
        zero_shot(run, "photos", *PLAIN)


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "empty"])
def test_what_is_kept_and_damaged_is_made_anew(run: Run, photos: list[str], damage: str) -> None:
    first = said(run, "photos", *PLAIN)
    kept = sorted(Path("multimodal/clip").glob("*.safetensors"))
    assert len(kept) == 2
    for path in kept:
        content = path.read_bytes()
        broken = {
            "cut": content[: len(content) - 3],
            "flipped": content[:-3] + bytes([content[-3] ^ 64]) + content[-2:],
            "other": Path("model.safetensors").read_bytes(),
            "empty": b"",
        }
        path.write_bytes(broken[damage])
    assert said(run, "photos", *PLAIN) == first
    for path in kept:  # whole again
        tensors, metadata = read_safetensors(path)
        assert list(tensors) == ["embeddings"]
        assert metadata.keys() == {"format", "table", "checksum"}


def test_an_image_is_embedded_once(run: Run, photos: list[str], embedded: list[int]) -> None:
    first = said(run, "photos", *PLAIN)
    assert sum(embedded) == 5
    again = said(run, "photos/../photos", "--labels", "cat,dog,a red car")
    assert list(again.values()) == list(first.values())
    assert sum(embedded) == 5
    Image.new("RGB", (40, 30), "red").save("photos/1.png")
    changed = said(run, "photos", *PLAIN)
    assert sum(embedded) == 6
    assert [path for path in first if changed[path] != first[path]] == ["photos/1.png"]
    pretrained.save("model.safetensors", checkpoint(seed=1))
    said(run, "photos", *PLAIN)
    assert sum(embedded) == 11


def test_a_folder_of_ones_own(run: Run, photos: list[str], embedded: list[int]) -> None:
    for _ in range(2):
        said(run, "photos", *PLAIN, "--cache", "kept/here")
    assert sum(embedded) == 5
    assert not Path("multimodal").exists()
    assert len(list(Path("kept/here").glob("*.safetensors"))) == 2


def test_nothing_can_be_kept(run: Run, photos: list[str]) -> None:
    Path("file").touch()
    result = zero_shot(run, "photos", *PLAIN, "--cache", "file")
    assert result.code == 0
    assert len(result.out.splitlines()) == 20
    (line,) = result.err.splitlines()
    assert line.startswith("multimodal: warning: embeddings are not kept in file: ")


# ---------------------------------------------------------------------------------------------------------- images


def test_three_images_and_two_text_files(run: Run, photos: list[str]) -> None:
    for at, name in ((3, "notes.txt"), (4, "captions.tsv")):
        Path(photos[at]).rename(f"photos/{name}")
        Path("photos", name).write_text("a cat")
    assert list(said(run, "photos", *PLAIN)) == photos[:3]
    Path("photos/notes.txt").rename("photos/7.jpg")
    result = zero_shot(run, "photos", "photos/captions.tsv", *PLAIN, "--json")
    assert result.code == 1
    assert [json.loads(line)["path"] for line in result.out.splitlines()] == photos[:3]
    assert [line.split(": ")[2] for line in result.err.splitlines()] == ["photos/7.jpg", "photos/captions.tsv"]


def test_a_sheet(run: Run, photos: list[str]) -> None:
    before = [Path(path).read_bytes() for path in photos]
    assert zero_shot(run, "photos", *PLAIN, "--sheet", "sheet.png").code == 0
    sheet = Image.open("sheet.png")
    assert sheet.size == (5 * 168 + 8, 160 + 18 + 8 + 8)
    pixels = [sheet.convert("RGB").getpixel((8 + 168 * at + 2, 8 + 60)) for at in range(5)]
    assert pixels == [Image.open(path).getpixel((0, 10)) for path in photos]
    assert [Path(path).read_bytes() for path in photos] == before


def test_a_checkpoint_that_lacks_what_is_needed(run: Run, photos: list[str]) -> None:
    pretrained.save("model.safetensors", replace(checkpoint(), preprocess=None))
    assert zero_shot(run, "photos", *PLAIN).error.startswith("model.safetensors: lacks how its images")
    pretrained.save("model.safetensors", replace(checkpoint(), tokenizer=None))
    assert zero_shot(run, "photos", *PLAIN).error.startswith("model.safetensors: its tokenizer is None")
