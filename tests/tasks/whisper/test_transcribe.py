"""`multimodal transcribe`, on a tiny random model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from multimodal.pretrained import Checkpoint, save
from multimodal.quantize import HOLDS_FOR, Int8Head, quantize
from tasks.cli import Parser
from tasks.errors import UsageError
from tasks.whisper import transcribe
from tasks.whisper.segments import Transcript
from tests.tasks.whisper.scripted import tiny_model, tokenizer

RATE = 16000


class Run:
    """The verb, through the parser of the command line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        parser = Parser(prog="multimodal transcribe", description="")
        parser.set_defaults(task="the registry's record")
        transcribe.add_arguments(parser)
        code = transcribe.run(parser.parse_args([str(one) for one in arguments]))
        return code, *self.capsys.readouterr()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A safetensors file."""
    return saved(tmp_path_factory.mktemp("model") / "tiny.safetensors")


def saved(path: Path, languages: tuple[str, ...] = (), **record: Any) -> Path:
    torch.manual_seed(3)
    of = tokenizer(languages=languages)
    preprocess = {"num_mels": 8, "sample_rate": RATE, "fft_size": 400, "hop_length": 160}
    fields = {"preprocess": preprocess, "tokenizer": of.to_dict()} | record
    save(path, Checkpoint.of("whisper", tiny_model(of, text_context=16), **fields))
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    """A second of noise each, a.wav and b.flac."""
    paths = [tmp_path / "sounds/a.wav", tmp_path / "sounds/b.flac"]
    paths[0].parent.mkdir()
    for path in paths:
        soundfile.write(path, 0.1 * torch.randn(RATE).numpy(), RATE)
    return paths


def test_text_of_each_recording(run: Run, model: Path, recordings: list[Path]) -> None:
    code, out, err = run(recordings[0], "--checkpoint", model, "--temperature", "0")
    assert (code, "error" in err) == (0, False)
    assert str(recordings[0]) not in out
    code, both, _ = run(recordings[0].parent, "--checkpoint", model, "--temperature", "0")
    assert code == 0
    lines = both.splitlines()
    assert both.startswith(f"{recordings[0]}\n{out}")
    assert str(recordings[1]) in lines


def test_a_file_in_each_format(run: Run, model: Path, recordings: list[Path], tmp_path: Path) -> None:
    code, out, _ = run(
        *recordings, "--checkpoint", model, "--format", "txt,srt,vtt,tsv,json", "--output-dir", tmp_path / "new/out",
        "--word-timestamps", "--temperature", "0", "--beam-size", "2", "--batch-size", "1",
    )  # fmt: skip
    assert (code, out) == (0, "")
    names = {path.name for path in (tmp_path / "new/out").iterdir()}
    assert names == {f"{stem}.{suffix}" for stem in "ab" for suffix in ("txt", "srt", "vtt", "tsv", "json")}
    data = json.loads((tmp_path / "new/out/a.json").read_text())
    assert data["duration"] == 1.0
    for segment in data["segments"]:
        assert 0 <= segment["start"] <= segment["end"] <= 1.0
        assert all(0 <= word["start"] <= word["end"] <= 1.0 for word in segment["words"])


def test_batches_change_nothing(run: Run, model: Path, recordings: list[Path]) -> None:
    alone = run(*recordings, "--checkpoint", model, "--batch-size", "1")
    assert run(*recordings, "--checkpoint", model, "--batch-size", "8") == alone


def test_equal_names_keep_their_ending(run: Run, model: Path, recordings: list[Path], tmp_path: Path) -> None:
    other = recordings[0].with_suffix(".flac")
    soundfile.write(other, torch.zeros(10).numpy(), RATE)
    assert run(recordings[0], other, "--checkpoint", model, "--output-dir", tmp_path)[0] == 0
    assert (tmp_path / "a.wav.txt").is_file()
    assert (tmp_path / "a.flac.txt").read_text() == ""
    (tmp_path / "deeper").mkdir()
    again = tmp_path / "deeper/a.wav"
    soundfile.write(again, torch.zeros(10).numpy(), RATE)
    with pytest.raises(UsageError, match=r"a\.wav is not the only recording named a\.wav$"):
        run(recordings[0], again, "--checkpoint", model, "--output-dir", tmp_path)


def test_a_bad_recording_leaves_the_others_alone(run: Run, model: Path, recordings: list[Path]) -> None:
    bad = recordings[0].with_name("empty.wav")
    bad.touch()
    code, out, err = run(bad, recordings[0], "none.wav", "--checkpoint", model, "--temperature", "0")
    assert code == 1
    errors = [line for line in err.splitlines() if line.startswith("multimodal: error: ")]
    assert errors == [
        f"multimodal: error: {bad}: the file is empty, expected an audio file",
        "multimodal: error: none.wav: no such file, expected an audio file",
    ]
    assert out.startswith(f"{recordings[0]}\n")


def test_what_is_done_is_written_though_the_first_is_not(
    run: Run, model: Path, recordings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Iterator[tuple[int, Transcript]]:
        yield 1, Transcript("b", None, 1.0, [])
        raise KeyboardInterrupt

    monkeypatch.setattr(transcribe.Transcriber, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*recordings, "--checkpoint", model, "--output-dir", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.txt"]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_that_takes_no_files_is_told_before_the_work(
    run: Run, model: Path, recordings: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(transcribe.Transcriber, "run", lambda *_: pytest.fail("has begun"))
    with pytest.raises(UsageError, match=r"file.*: .*, expected a folder that takes files$"):
        run(recordings[0], "--checkpoint", model, "--output-dir", tmp_path / place)


@pytest.mark.parametrize("samples", [0, 1, 100, 5 * RATE])
def test_silence_is_empty(run: Run, model: Path, tmp_path: Path, samples: int) -> None:
    soundfile.write(tmp_path / "a.wav", torch.zeros(samples).numpy(), RATE)
    assert run(tmp_path / "a.wav", "--checkpoint", model)[:2] == (0, "")


def test_the_language_is_in_the_transcript(run: Run, recordings: list[Path], tmp_path: Path) -> None:
    path = saved(tmp_path / "many.safetensors", ("en", "de"))
    for given, expected in (("de", {"de"}), ("auto", {"en", "de"})):
        _, out, _ = run(
            recordings[0], "--checkpoint", path, "--language", given, "--format", "json", "--temperature", "0"
        )
        assert json.loads(out)["language"] in expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "doc"], "argument --format: 'doc' is not one of txt, srt, vtt, tsv, json"),
        (["--format", "txt,srt"], "--output-dir is missing, expected where to write several files"),
        (["--temperature", "nan"], "argument --temperature: 'nan' is not a number of at least 0"),
        (["--temperature", "hot"], "'hot' is not a number of at least 0"),
        (["--beam-size", "0"], "'0' is not a whole number of at least 1"),
        (["--task", "summarize"], "invalid choice: 'summarize'"),
        (["--laguage", "en"], "unknown flag --laguage: did you mean --language?"),
    ],
)
def test_mistyped_flags(run: Run, model: Path, recordings: list[Path], arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(recordings[0], "--checkpoint", model, *arguments)
    assert message in str(caught.value)


def test_a_model_that_cannot(run: Run, model: Path, recordings: list[Path], tmp_path: Path) -> None:
    cases = {
        (saved(tmp_path / "none.safetensors", tokenizer=None),): "has no tokenizer, expected a tokenizer.json",
        (saved(tmp_path / "odd.safetensors", tokenizer={"a": 1}),): "tokenizer record {'a': 1}: expected",
        (saved(tmp_path / "mel.safetensors", preprocess={"size": 5}),): "preprocess record has size: expected",
        (model, "--language", "de"): "language 'de': the model is for one language alone",
        (model, "--task", "translate"): "translation: the model is for one language alone",
        (model, "--device", "nowhere"): "--device nowhere: ",
    }
    for arguments, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            run(recordings[0], "--checkpoint", *arguments)
        assert message in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"nothing: no recording in this folder$"):
        run(tmp_path / "nothing", "--checkpoint", model)


def test_int8(run: Run, model: Path, recordings: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.__version__.startswith("2.14.") and torch.cpu.get_capabilities().get("avx512_vnni"):
        made = []
        monkeypatch.setattr(transcribe, "quantize", lambda model: (quantize(model), made.append(model)))
        code, out, err = run(*recordings, "--checkpoint", model, "--int8", "--device", "cpu", "--temperature", "0")
        assert (code, "error" in err) == (0, False)
        assert out.startswith(f"{recordings[0]}\n")
        assert isinstance(made[0].step_head, Int8Head)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    with pytest.raises(UsageError, match=f"^--int8: torch 2.9.0, expected {re.escape(HOLDS_FOR)}$"):
        run(*recordings, "--checkpoint", model, "--int8", "--device", "cpu")
