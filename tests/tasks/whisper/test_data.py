"""What a batch holds, the order of training, the tokenizer; whatever the samples come from."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import save
from tasks.data import EpochSampler
from tasks.whisper.augment import SpeechAugment
from tasks.whisper.data import SpeechData
from tasks.whisper.samples import Morse
from tests.tasks.test_export import tiny
from tests.tasks.whisper.spoken import write_table

OPTIONS: dict[str, Any] = {
    "num_mels": 8,
    "audio_context": 100,
    "text_context": 20,
    "mask_padding": True,
    "num_workers": 0,
}
TEXTS = {f"{name}.wav": f"word {name}" for name in "abcdefghijkl"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve recordings, each longer than the one before."""
    return write_table(tmp_path, TEXTS, **{name: 0.1 * (1 + at) for at, name in enumerate("abcdefghijkl")})


def ready(stage: str = "fit", **options: Any) -> SpeechData:
    data = SpeechData(**{**OPTIONS, "batch_size": 3, **options})
    data.setup(stage)
    return data


def test_a_batch(root: Path) -> None:
    data = ready(root=str(root))
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"mel", "audio_length", "tokens", "labels"}
    count = batch["mel"].shape[2]
    assert batch["mel"].shape == (3, 8, count)
    assert int(batch["audio_length"].max()) == count // 2
    tokenizer = data.tokenizer
    for row in range(3):
        sound = 2 * int(batch["audio_length"][row])
        assert (batch["mel"][row, :, sound:] == 0).all()
        assert batch["mel"][row, :, : sound - 1].abs().sum(0).min() > 0
        labels = batch["labels"][row][batch["labels"][row] != -1].tolist()
        assert labels[-1] == tokenizer.end
        assert tokenizer.decode(labels).startswith("word ")
        length = len(labels) + len(data.prompt) - 1
        assert batch["tokens"][row, :length].tolist() == [*data.prompt, *labels[:-1]]
        assert (batch["labels"][row, : len(data.prompt) - 1] == -1).all()


def test_to_measure_a_batch_holds_the_texts(root: Path) -> None:
    batch = next(iter(ready(root=str(root)).val_dataloader()))
    texts = ["".join(chr(one) for one in row if one != -1) for row in batch["text"].tolist()]
    assert texts
    assert set(texts) <= set(TEXTS.values())


def test_spectrograms_that_never_change_are_made_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = {"num_messages": 4, "sample_rate": 2000, "fft_size": 64, "hop_length": 40, "audio_context": 1200}
    made: list[int] = []
    for options, kept in (
        (messages, True),
        ({**messages, "augment": SpeechAugment(speed=0.1)}, False),
        ({"root": str(root)}, False),
    ):
        dataset = ready(**{"text_context": 64, **options}).datasets["train"]
        sound = type(dataset.samples).sound
        monkeypatch.setattr(
            type(dataset.samples), "sound", lambda *given, sound=sound: (made.append(1), sound(*given))[1]
        )
        made.clear()
        first, second = dataset[(0, 1)], dataset[(1, 1)]
        assert len(made) == (1 if kept else 2)
        assert torch.equal(first["mel"], second["mel"]) == ("augment" not in options)
        monkeypatch.undo()


def test_a_window_is_whole_where_padding_is_looked_at(root: Path) -> None:
    batch = next(iter(ready(root=str(root), mask_padding=False).train_dataloader()))
    assert batch["mel"].shape == (3, 8, 200)
    assert batch["audio_length"].tolist() == [100, 100, 100]


def test_recordings_of_a_batch_have_similar_lengths(tmp_path: Path) -> None:
    dataset = ready(num_messages=400, sample_rate=2000, fft_size=64, hop_length=40, audio_context=1200,
                    text_context=64, batch_size=8).datasets["train"]  # fmt: skip
    seconds = np.array(dataset.samples.seconds)
    sampler = EpochSampler(len(dataset), training=True, shuffle=dataset.shuffle)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = [key[1] for key in sampler]
        assert sorted(order) == list(range(400))
        batches = seconds[order].reshape(-1, 8)
        shuffled = np.random.default_rng(0).permutation(seconds).reshape(-1, 8)
        assert np.ptp(batches, axis=1).mean() < 0.2 * np.ptp(shuffled, axis=1).mean()
        assert abs(np.corrcoef(np.arange(50), batches.mean(axis=1))[0, 1]) < 0.4, "in no order of length"
        epochs.append(order)
    assert epochs[0] != epochs[1]
    sampler.leave_out(1, 24)
    assert [key[1] for key in sampler] == epochs[1][24:]


def test_a_curriculum_begins_with_the_shortest(root: Path) -> None:
    lengths = {name: 0.8 * (1 + at) for at, name in enumerate("abcdefghijkl")}
    data = ready(root=str(write_table(root, TEXTS, **lengths)), curriculum=True, audio_context=600, batch_size=2)
    dataset, rng = data.datasets["train"], np.random.default_rng(0)
    assert (np.diff(np.ceil(np.array(dataset.samples.seconds)[dataset.shuffle(rng, 0)] / 2)) >= 0).all()
    assert dataset.shuffle(rng, 0).tolist() != dataset.shuffle(rng, 0).tolist(), "but what is alike comes in any order"
    assert (np.diff(np.ceil(np.array(dataset.samples.seconds)[dataset.shuffle(rng, 1)] / 2)) < 0).any()


def test_augmentation_is_a_function_of_seed_epoch_and_index(root: Path) -> None:
    augment = SpeechAugment(speed=0.2, time_masks=1, channel_masks=1)
    dataset = ready(root=str(root), augment=augment).datasets["train"]
    first, again, other = dataset[0, 3], dataset[0, 3], dataset[1, 3]
    assert torch.equal(first["mel"], again["mel"])
    assert first["mel"].shape != other["mel"].shape or not torch.equal(first["mel"], other["mel"])
    val = ready(root=str(root), augment=augment).datasets["val"]
    assert torch.equal(val[0, 0]["mel"], val[1, 0]["mel"])


def test_messages_of_the_splits_have_words_of_their_own() -> None:
    words = {split: {w for text in Morse(split, 300).texts for w in text.split()} for split in ("train", "val", "test")}
    assert not words["train"] & words["test"]
    assert not words["train"] & words["val"]
    assert not words["val"] & words["test"]
    assert len(words["test"]) > 500


def test_the_tokenizer_has_the_characters_of_the_training_texts(root: Path) -> None:
    data = ready(root=str(root))
    assert data.tokenizer.spells
    assert data.vocab_size == data.tokenizer.vocab_size
    train = {character for text in data.datasets["train"].samples.texts for character in text}
    assert all(data.tokenizer.unknown(character) == "" for character in train)
    again = SpeechTokenizer.from_record(data.tokenizer.to_dict())
    assert again.encode("word a") == data.tokenizer.encode("word a")


def test_other_scripts_have_tokens(tmp_path: Path) -> None:
    texts = {f"{n}.wav": text for n, text in enumerate(["你好", "مرحبا", "再见", "سلام", "你见", "مرا"])}
    data = ready(root=str(write_table(tmp_path, texts)))
    samples = data.datasets["train"].samples
    for index, tokens in enumerate(data.datasets["train"].tokens):
        assert data.tokenizer.decode(tokens) == samples.texts[index]


def test_a_character_that_training_has_not_is_measured_as_wrong_but_not_trained_on(tmp_path: Path) -> None:
    texts = {f"{n}.wav": "ab" for n in range(6)} | {"z.wav": "aéb"}
    rows = [f"{name}\t{text}\t{'test' if name == 'z.wav' else 'train'}" for name, text in texts.items()]
    root = write_table(tmp_path, texts)
    (root / "t.tsv").write_text("\n".join(["file\ttext\tsplit", *rows]) + "\n")
    (item,) = ready("test", root=str(root)).datasets["test"]  # type: ignore[misc]
    assert "".join(map(chr, item["text"].tolist())) == "aéb"
    assert len(item["tokens"]) == 4, "prompt, a and b"
    save(tmp_path / "w.safetensors", tiny("whisper"))
    (root / "t.tsv").write_text("file\ttext\n" + "".join(f"{n}.wav\taéb\n" for n in range(6)))
    with pytest.raises(ValueError, match=r"\d\.wav: its text has 'é', expected characters that the tokenizer has$"):
        ready(root=str(root), tokenizer=str(tmp_path / "w.safetensors"))


def test_the_tokenizer_of_a_checkpoint(root: Path, tmp_path: Path) -> None:
    save(tmp_path / "w.safetensors", tiny("whisper"))
    texts = {f"{n}.wav": "abc cab" for n in range(4)}
    data = ready(root=str(write_table(tmp_path / "abc", texts)), tokenizer=str(tmp_path / "w.safetensors"))
    assert data.tokenizer.to_dict() == tiny("whisper").tokenizer
    assert data.vocab_size == tiny("whisper").config["vocab_size"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": "table", "source": "https://x"},
            "data.root is missing, expected --data.root FOLDER for data.dataset table; the data come from https://x",
        ),
        ({"dataset": "morse", "root": "x"}, "data.root is x and data.dataset morse, which needs none: expected one of"),
        ({"root": "/nowhere"}, "data root /nowhere: no such folder, expected a folder of recordings"),
        ({"num_messages": 0}, "num_messages is 0, expected at least 1"),
        ({"tokenizer": "/nowhere.json"}, "data.tokenizer /nowhere.json: no such file, expected a tokenizer.json"),
        ({"hop_length": 160}, "model.audio_context is 100, which are 2.0 s, expected the "),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ready(**options)


def test_a_text_that_is_too_long_is_named(root: Path) -> None:
    table = root / "t.tsv"
    table.write_text(table.read_text().replace("word f", "w" * 600))
    with pytest.raises(
        ValueError, match=r"f\.wav: its text has 602 tokens with the prompt, expected at most 20 \(model"
    ):
        ready(root=str(root), val_fraction=0.01, test_fraction=0.0)
