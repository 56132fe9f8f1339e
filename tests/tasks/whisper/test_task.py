"""Training through the real command line: Morse code, recordings, published weights; what is made of the result."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from multimodal import pretrained
from multimodal.ctc import CTCPrefix
from multimodal.data.morse import draw_message
from multimodal.models.whisper import Whisper
from multimodal.pretrained import Checkpoint
from multimodal.pretrained.openai_whisper import to_openai
from tasks.run import read_metrics
from tasks.whisper.data import SpeechData, collate
from tasks.whisper.task import WhisperModule
from tests.tasks.commands import PLAIN, QUIET, Run
from tests.tasks.test_export import tiny
from tests.tasks.whisper.spoken import write_table

STACK = {"embed_dim": 16, "depth": 1, "num_heads": 2}
MODEL: dict[str, Any] = {
    "num_mels": 8,
    "audio_context": 50,
    "text_context": 20,
    "vocab_size": 15,
    "mask_padding": True,
}


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_table(tmp_path / "words", {f"{n}.wav": ("abc", "cab", "a b")[n % 3] for n in range(12)})


@pytest.fixture(scope="module")
def morse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an epoch on Morse code. Not to be written into."""
    from tasks.cli import main

    root = tmp_path_factory.mktemp("runs")
    assert main(["fit", "whisper", *PLAIN["whisper"], "--trainer.max_epochs", "1",
                 "--trainer.default_root_dir", str(root)]) == 0  # fmt: skip
    (run,) = (root / "whisper").iterdir()
    return run


def trained(root: Path) -> Path:
    (run,) = (root / "whisper").iterdir()
    return run


def module(**options: Any) -> WhisperModule:
    stacks = {"encoder": stack_of(options.pop("encoder", {})), "decoder": stack_of({})}
    return WhisperModule(**MODEL, **stacks, **options)


def stack_of(changes: dict[str, Any]) -> Any:
    from multimodal.blocks import StackConfig

    return StackConfig(**(STACK | changes))


def batch() -> dict[str, torch.Tensor]:
    items = [
        {"mel": torch.randn(8, frames), "tokens": torch.tensor([9, 14, *text]), "labels": torch.tensor([-1, *text, 8])}
        for frames, text in ((40, [1, 2, 3]), (31, [4]), (12, [5, 5]))
    ]
    return collate(items, None)


# ------------------------------------------------------------------------------------------------------------ the loss


def test_the_loss_is_the_mean_over_all_tokens_that_are_to_be_predicted() -> None:
    model, given = module(), batch()
    mask = torch.arange(20) < given["audio_length"][:, None]
    log_probs = model.model(given["mel"], given["tokens"], mask).log_softmax(-1)
    wanted = [(0, 1, 1), (0, 2, 2), (0, 3, 3), (0, 4, 8), (1, 1, 4), (1, 2, 8), (2, 1, 5), (2, 2, 5), (2, 3, 8)]
    expected = -torch.stack([log_probs[at] for at in wanted]).mean()
    assert float(model.loss(given)) == pytest.approx(float(expected), rel=1e-5)
    smoothed = module(label_smoothing=0.2)
    smoothed.load_state_dict(model.state_dict())
    spread = -torch.stack([log_probs[row, at].mean() for row, at, _ in wanted]).mean()
    assert float(smoothed.loss(given)) == pytest.approx(float(0.8 * expected + 0.2 * spread), rel=1e-5)


def test_the_encoder_is_asked_for_the_text_as_well() -> None:
    model, given = module(ctc_weight=0.25), batch()
    plain = module()
    plain.load_state_dict(model.state_dict())
    mask = torch.arange(20) < given["audio_length"][:, None]
    heard = model.model(given["mel"], given["tokens"], mask, need_heard=True).heard.log_softmax(-1)
    losses = [
        torch.nn.functional.ctc_loss(
            heard[row, :length, None], torch.tensor([text]), (length,), (len(text),), blank=8, reduction="sum"
        )
        / len(text)
        for row, (length, text) in enumerate(((20, [1, 2, 3]), (16, [4]), (6, [5, 5])))
    ]
    expected = 0.75 * float(plain.loss(given)) + 0.25 * float(torch.stack(losses).mean())
    assert float(model.loss(given)) == pytest.approx(expected, rel=1e-5)


def test_padding_changes_no_loss() -> None:
    model, given = module(ctc_weight=0.25), batch()
    wider = {**given, "mel": torch.nn.functional.pad(given["mel"], (0, 10))}
    assert float(model.loss(wider)) == pytest.approx(float(model.loss(given)), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0, expected a share in [0, 1)"),
        ({"ctc_weight": -0.1}, "ctc_weight is -0.1, expected a share in [0, 1)"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(**options)


def test_a_few_clips_are_learned_by_heart_and_end(run: Run, words: Path, tmp_path: Path) -> None:
    flags = [
        *PLAIN["whisper"],
        *(f for part in ("encoder", "decoder") for f in (f"--model.{part}.embed_dim", "48")),
        *("--model.encoder.rope", "null", "--model.ctc_weight", "0.3", "--model.stem_stride", "2"),
        *("--data.root", words, "--data.batch_size", "3", "--data.val_fraction", "0.01", "--data.test_fraction", "0"),
        *("--data.curriculum", "false", "--trainer.max_steps", "60", "--trainer.max_epochs", "-1"),
        *("--trainer.overfit_batches", "1", "--model.lr", "0.01", "--trainer.default_root_dir", tmp_path),
        *("--trainer.limit_val_batches", "1", "--trainer.log_every_n_steps", "1"),
    ]
    result = run("fit", "whisper", *flags)
    assert result.code == 0, result.err
    losses = [row["train/loss_step"] for row in read_metrics(trained(tmp_path)) if "train/loss_step" in row]
    assert losses[-1] < 0.3 < 2 < losses[0]


# --------------------------------------------------------------------------------------------------------- whole runs


def test_morse_code_needs_nothing_from_outside(run: Run, morse: Path) -> None:
    summary = json.loads((morse / "summary.json").read_text())
    assert (summary["task"], summary["metric"]) == ("whisper", "cer")
    last = read_metrics(morse)[-1]
    assert last["test/cer"] == pytest.approx(summary["value"], abs=1e-6)
    assert last["test/wer"] > 0
    tested = run("test", "whisper", "--checkpoint", morse, *QUIET, "--trainer.limit_test_batches", "2")
    assert tested.code == 0, tested.err
    assert re.search(r"test/cer +(\S+)", tested.out)
    assert float(re.search(r"test/cer +(\S+)", tested.out)[1]) == pytest.approx(summary["value"], abs=1e-4)  # type: ignore[index]


def test_a_run_transcribes_from_the_typed_command_line(run: Run, morse: Path, tmp_path: Path) -> None:
    for index, rate in ((0, 8000), (1, 2000)):
        soundfile.write(tmp_path / f"{index}.wav", draw_message(0, index).sound(rate).numpy(), rate)
    sounds = [tmp_path / "0.wav", tmp_path / "1.wav"]
    alone = [run("transcribe", sound, "--checkpoint", morse, "--temperature", "0") for sound in sounds]
    assert [one.code for one in alone] == [0, 0], alone[0].err
    both = run("transcribe", *sounds, "--checkpoint", morse, "--temperature", "0")
    assert both.out == "".join(f"{sound}\n{one.out}" for sound, one in zip(sounds, alone, strict=True))
    vad = run("transcribe", sounds[0], "--checkpoint", morse, "--vad")
    assert vad.error == f"--checkpoint {morse}: hears 2000 samples a second, expected 16000 for --vad"


def test_a_checkpoint_holds_spectrogram_and_tokenizer(morse: Path) -> None:
    loaded = pretrained.load(morse, task="whisper")
    assert loaded.preprocess == {
        "num_mels": 8,
        "sample_rate": 2000,
        "fft_size": 64,
        "hop_length": 40,
        "mean": 0.16,
        "std": 0.26,
    }
    assert loaded.tokenizer["tokenizer"]["model"]["vocab"].keys() >= set("AZ09 ")
    assert loaded.config["vocab_size"] == loaded.model.embed.weight.shape[0]  # type: ignore[union-attr, index]


@pytest.mark.parametrize("kind", ["openai", "huggingface"])
def test_published_weights_are_tuned_with_their_spectrogram_and_tokenizer(
    kind: str, run: Run, words: Path, tmp_path: Path
) -> None:
    source = tmp_path / {"openai": "a.pt", "huggingface": "folder"}[kind]
    start = published()
    if kind == "openai":
        to_openai(start, source)
        (tmp_path / "tokenizer.json").write_text(json.dumps(start.tokenizer["tokenizer"]))
    else:
        assert run("export", "whisper", "--checkpoint", kept(start, tmp_path), "--to", kind, source).code == 0
    result = run(
        *("fit", "whisper", "--init", source, "--freeze", '["stem.*", "encoder.*"]', "--data.root", words, *QUIET),
        *("--model.ctc_weight", "0", "--data.batch_size", "4", "--trainer.max_steps", "2"),
        *("--trainer.default_root_dir", tmp_path / "runs", "--model.normalize", "english"),
    )
    assert result.code == 0, result.err
    checkpoint = pretrained.read(trained(tmp_path / "runs"))
    spectrogram = {"num_mels": 8, "sample_rate": 16000, "fft_size": 400, "hop_length": 160}
    assert checkpoint.preprocess == spectrogram | {"mean": 0.0, "std": 1.0}
    assert checkpoint.tokenizer == start.tokenizer
    assert checkpoint.config["encoder"] == start.config["encoder"]
    assert checkpoint.config["mask_padding"] is False
    for name, value in start.state_dict.items():
        same = torch.equal(checkpoint.state_dict[name], value)
        assert same == name.startswith(("stem.", "encoder.", "audio_positions")), name
    resumed = run("fit", "whisper", "--resume", trained(tmp_path / "runs"), "--trainer.max_steps", "3", *QUIET)
    assert resumed.code == 0, resumed.err


def published() -> Checkpoint:
    return tiny("whisper", audio_context=50, text_context=20)


def kept(checkpoint: Checkpoint, folder: Path) -> Path:
    pretrained.save(folder / "start.safetensors", checkpoint)
    return folder / "start.safetensors"


def test_a_shorter_window_has_the_first_positions(run: Run, words: Path, tmp_path: Path) -> None:
    result = run(
        *("fit", "whisper", "--init", kept(published(), tmp_path), "--model.audio_context", "30", *QUIET),
        *("--data.root", words, "--data.batch_size", "4", "--trainer.max_steps", "1", "--model.ctc_weight", "0"),
        *("--trainer.default_root_dir", tmp_path / "runs"),
    )
    assert result.code == 0, result.err
    found = pretrained.read(trained(tmp_path / "runs")).state_dict["audio_positions"]
    assert torch.equal(found, published().state_dict["audio_positions"][:30])


def test_a_run_is_exported_as_it_is_trained(run: Run, morse: Path, tmp_path: Path) -> None:
    for form, name in (("safetensors", "a.safetensors"), ("onnx", "a.onnx"), ("torch-export", "a.pt2")):
        result = run("export", "whisper", "--checkpoint", morse, "--to", form, tmp_path / name)
        assert result.code == 0, result.err
    refused = run("export", "whisper", "--checkpoint", morse, "--to", "openai", tmp_path / "a.pt")
    assert "that format cannot express" in refused.error
    assert "mask_padding True" in refused.error


def test_a_sample_that_is_no_number_is_named(run: Run, words: Path, tmp_path: Path) -> None:
    samples = soundfile.read(words / "0.wav")[0]
    samples[7] = float("nan")
    for name in words.glob("*.wav"):
        soundfile.write(name, samples, 8000, subtype="FLOAT")
    flags = ["--data.root", words, "--data.num_workers", "0", "--trainer.default_root_dir", tmp_path]
    error = run("fit", "whisper", *PLAIN["whisper"], *flags).error
    assert re.fullmatch(rf"{words}/\d+\.wav: sample 7 is nan, expected numbers of about -1 … 1(;.*)?", error)


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_texts_are_generated_as_the_model_says_token_by_token(weight: float) -> None:
    model, given = module(ctc_weight=weight), batch()
    model.eval()
    mask = torch.arange(20) < given["audio_length"][:, None]
    data = object.__new__(SpeechData)
    data.tokenizer, data.prompt = pretrained_tokenizer(), [9, 14]
    model._trainer = type("Trainer", (), {"datamodule": data})()
    with torch.inference_mode():
        audio = model.model.encode(given["mel"], mask)
        found = model._written(audio, mask, given)
        for row, said in enumerate(found):
            assert said == _one_by_one(model.model, given, row, data)


def pretrained_tokenizer() -> Any:
    from multimodal.data.speech_text import SpeechTokenizer

    return SpeechTokenizer.from_characters("abcdefg ")


def _one_by_one(model: Whisper, given: dict[str, torch.Tensor], row: int, data: SpeechData) -> str:
    length = int(given["audio_length"][row])
    tokens = list(data.prompt)
    while len(tokens) - 2 < min(length, 18):
        out = model(given["mel"][row : row + 1, :, : 2 * length], torch.tensor([tokens]), need_heard=True)
        heard, share = CTCPrefix(out.heard, data.tokenizer.end), model.config.ctc_weight
        for token in tokens[len(data.prompt) :]:
            heard.append(torch.tensor([token]))
        logits = out.logits[0, -1].log_softmax(-1)
        if share:
            logits = (1 - share) * logits + share * heard.scores()[0]
        logits[data.tokenizer.end + 1 :] = float("-inf")
        tokens.append(int(logits.argmax()))
        if tokens[-1] == data.tokenizer.end:
            break
    return data.tokenizer.decode(tokens).strip()
