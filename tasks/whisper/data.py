"""Sounds with their texts: embedded Morse code, a table or folder of recordings, LibriSpeech, Speech Commands.

B batch, C mel channels, T frames, A audio tokens, N text tokens, M characters of the longest text
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from multimodal import pretrained
from multimodal.data import seeded
from multimodal.data.audio import SAMPLE_RATE, LogMel
from multimodal.data.speech_text import SpeechTokenizer
from tasks.data import Key, TaskData
from tasks.whisper import sources
from tasks.whisper.augment import SpeechAugment
from tasks.whisper.samples import ALPHABET, Morse, Recordings, Samples
from tasks.whisper.sources import Found, Limits, TableOptions

DatasetName = Literal["morse", "table", "folder", "librispeech", "speechcommands"]

IGNORED = -1
"""The label where none is to be predicted, and the character where there is none."""
_SORTED = 50
"""Batches whose samples are dealt out by length."""
_GRAIN = 2.0
"""Seconds in which lengths are told apart: by finer ones short words would come in batches of one word each."""
NO_AUGMENTATION, TABLE = SpeechAugment(), TableOptions()


class SpeechDataset(Dataset[dict[str, Tensor]]):
    """Items, by key or by index alone, which `collate` makes a batch of.

    Augmentation draws its random numbers from the seed and that key alone.

    Args:
        samples: sounds and texts.
        mel: the spectrogram.
        tokenizer: what texts are written with.
        prompt: tokens that every text follows.
        most: samples a sound may have, and tokens a text.
        augment: random changes; None = none, to measure.
        seed: with the key it decides them.
        together: samples of a batch, over all processes, which are of similar length in training.
        curriculum: whether the first epoch goes from the shortest to the longest.
        keep: whether spectrograms stay in memory, where nothing random happens to them.

    Raises:
        ValueError: a text, by its sound's name, that has too many tokens, or in training a character without one.
    """

    def __init__(
        self,
        samples: Samples,
        mel: LogMel,
        tokenizer: SpeechTokenizer,
        prompt: Sequence[int],
        *,
        most: tuple[int, int],
        augment: SpeechAugment | None,
        seed: int,
        together: int,
        curriculum: bool,
        keep: bool,
    ) -> None:
        self.samples = samples
        self.mel = mel
        self.prompt = list(prompt)
        self.most = most
        self.augment = augment
        self.seed = seed
        self.together = together
        self.curriculum = curriculum
        self.keep = keep
        self._kept: dict[int, Tensor] = {}
        self.tokens = [self._encode(tokenizer, index) for index in range(len(samples.texts))]

    def _encode(self, tokenizer: SpeechTokenizer, index: int) -> list[int]:
        """Prompt, text and end."""
        text, name = self.samples.texts[index], self.samples.name(index)
        if unknown := tokenizer.unknown(text):
            if self.augment is not None:
                raise ValueError(f"{name}: its text has {unknown[0]!r}, expected characters that the tokenizer has")
            text = "".join(one for one in text if one not in unknown)
        # Published tokenizers write a word with the space before it, the first one too.
        tokens = [*self.prompt, *tokenizer.encode(text if tokenizer.spells else f" {text}"), tokenizer.end]
        if len(tokens) - 1 > self.most[1]:
            raise ValueError(
                f"{name}: its text has {len(tokens) - 1} tokens with the prompt, expected at most {self.most[1]} "
                "(model.text_context)"
            )
        return tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        return self.samples.fingerprint

    def shuffle(self, rng: np.random.Generator, epoch: int) -> NDArray[np.int64]:
        """A random order in which those that make a batch have similar lengths."""
        order, size = rng.permutation(len(self)), self.together
        length = np.ceil(np.asarray(self.samples.seconds) / _GRAIN)
        if self.curriculum and epoch == 0:
            return order[np.argsort(length[order], kind="stable")]
        pools = [order[at : at + _SORTED * size] for at in range(0, len(order), _SORTED * size)]
        order = np.concatenate([pool[np.argsort(length[pool], kind="stable")] for pool in pools])
        whole = len(order) // size * size
        batches = rng.permutation(order[:whole].reshape(-1, size))
        return np.concatenate([batches.ravel(), order[whole:]])

    def __getitem__(self, key: Key | int) -> dict[str, Tensor]:
        # Trainer flags such as overfit_batches bring a sampler of their own, which knows no epoch.
        key = key if isinstance(key, tuple) else (0, key)
        index = key[1]
        mel = self._mel(key)
        tokens = torch.tensor(self.tokens[index])
        labels = tokens[1:].clone()
        labels[: len(self.prompt) - 1] = IGNORED
        item = {"mel": mel, "tokens": tokens[:-1], "labels": labels}
        if self.augment is None:
            item["text"] = torch.tensor([ord(one) for one in self.samples.texts[index]])
        return item

    def _mel(self, key: Key) -> Tensor:
        """The spectrogram [C, T]; the same one in every epoch is made once where the sound is made as well."""
        index, augment = key[1], self.augment or NO_AUGMENTATION
        kept = self.keep and augment == NO_AUGMENTATION
        if kept and index in self._kept:
            return self._kept[index]
        sound = self.samples.sound(index, self.mel.sample_rate)
        with seeded(self.seed, *key):
            mel = augment.hide(self.mel(augment.play(sound, self.most[0])))
        if kept:
            self._kept[index] = mel
        return mel


def collate(items: Sequence[dict[str, Tensor]], size: int | None, stride: int = 2) -> dict[str, Tensor]:
    """A batch (see `SpeechData`) of audio tokens of `stride` frames each; `size` frames of sound, or as many as the
    longest has where that is None.
    """
    frames = [max(1, -(-item["mel"].shape[1] // stride)) * stride for item in items]
    longest = max(frames) if size is None else size
    batch = {
        "mel": torch.stack([pad(item["mel"], (0, longest - item["mel"].shape[1])) for item in items]),
        "audio_length": torch.tensor(frames if size is None else [longest] * len(items)) // stride,
    }
    for name, filler in (("tokens", 0), ("labels", IGNORED), ("text", IGNORED)):
        if name in items[0]:
            rows = [item[name] for item in items]
            batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filler)
    return batch


class SpeechData(TaskData):
    """Sounds and what they say.

    A batch holds

    - mel: float32 [B, C, T], zeros behind the end of a sound, up to the batch's longest or, without mask_padding, to
      the whole window
    - audio_length: int64 [B], audio tokens that are not padding
    - tokens: int64 [B, N], prompt and text
    - labels: int64 [B, N], the token that follows each, or -1 within the prompt and behind the end
    - text: int64 [B, M], where it is measured: the characters of the text, or -1

    In training the sounds of a batch are of similar length. What comes without val, or without val and test, is split
    recording by recording. Recordings that cannot be used are left out and named.

    Args:
        dataset: morse, which is made when it is asked for; table, of audio files and texts; folder, of audio files each
            beside a .txt; librispeech; speechcommands; None = what lies in root, or morse without root.
        root: Folder of the data; for a corpus, that in which LibriSpeech or SpeechCommands lies.
        source: Where people get the data that belong into root; told where root is missing.
        table: How the table is read.
        num_messages: Messages in Morse code to train on.
        tokenizer: A checkpoint whose tokenizer texts are written with, or a tokenizer.json; None = one of the
            characters that the training texts have.
        language: What is spoken, a code such as en, where the tokenizer knows several.
        num_mels: Channels of the spectrogram.
        sample_rate: Samples a second; others are resampled.
        fft_size: Samples of a frame.
        hop_length: Samples from a frame to the next.
        mean: Subtracted from the spectrogram.
        std: That it is divided by then.
        audio_context: Most audio tokens.
        text_context: Most text tokens, the prompt's included.
        stem_stride: Frames of an audio token.
        mask_padding: Cut a batch at its longest sound.
        curriculum: Go from the shortest sounds to the longest in the first epoch (SortaGrad, "Deep Speech 2", Amodei et
            al. 2016, section 3.2).
        augment: Random changes in training.
        **loader: Options of the loaders and of the split.

    Raises:
        ValueError: no root where the data set needs one, or one where it takes none; data that are missing or broken.
    """

    def __init__(  # noqa: PLR0913  what a checkpoint says of a spectrogram are flags
        self,
        *,
        dataset: DatasetName | None = None,
        root: str | None = None,
        source: str | None = None,
        table: TableOptions = TABLE,
        num_messages: int = 6000,
        tokenizer: str | None = None,
        language: str = "en",
        num_mels: int,
        sample_rate: int = SAMPLE_RATE,
        fft_size: int = 400,
        hop_length: int = 160,
        mean: float = 0.0,
        std: float = 1.0,
        audio_context: int,
        text_context: int,
        stem_stride: int = 2,
        mask_padding: bool,
        curriculum: bool = False,
        augment: SpeechAugment = NO_AUGMENTATION,
        **loader: Any,
    ) -> None:
        super().__init__(**loader)
        if num_messages < 1:
            raise ValueError(f"num_messages is {num_messages}, expected at least 1")
        self.name = _named(dataset, root, source)
        self.root = root
        self.in_memory = self.name == "morse"
        self.table = table
        self.num_messages = num_messages
        self.preprocess = LogMel(
            num_mels=num_mels, sample_rate=sample_rate, fft_size=fft_size, hop_length=hop_length, mean=mean, std=std
        )
        self.audio_context = audio_context
        self.frames = stem_stride * audio_context
        self.text_context = text_context
        self.curriculum = curriculum
        self.augment = augment
        self.collate = partial(collate, size=None if mask_padding else self.frames, stride=stem_stride)
        self.tokenizer, self.vocab_size = self._tokenizer(tokenizer)
        try:
            self.prompt = self.tokenizer.prompt(language, timestamps=False)
        except ValueError as error:
            raise ValueError(f"data.{error}") from None

    def _tokenizer(self, where: str | None) -> tuple[SpeechTokenizer, int]:
        """The tokenizer, and how many tokens a model of it has."""
        if where is None:
            characters = ALPHABET if self.name == "morse" else "".join(self._samples("train").texts)
            made = SpeechTokenizer.from_characters(characters)
            return made, made.vocab_size
        if where.endswith(".json"):
            if not Path(where).is_file():
                raise ValueError(f"data.tokenizer {where}: no such file, expected a tokenizer.json")
            read = SpeechTokenizer.from_file(Path(where), multilingual=False)
            return read, read.vocab_size
        checkpoint = pretrained.read(where, task="whisper")
        if checkpoint.tokenizer is None:
            raise ValueError(f"data.tokenizer {where}: has no tokenizer, expected a tokenizer.json beside it")
        return SpeechTokenizer.from_record(checkpoint.tokenizer), checkpoint.config["vocab_size"]

    def setup(self, stage: str) -> None:
        for split in {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}.get(stage, ()):
            if split not in self.datasets:
                self.datasets[split] = self._dataset(split)

    def _dataset(self, split: str) -> SpeechDataset:
        return SpeechDataset(
            self._samples(split),
            self.preprocess,
            self.tokenizer,
            self.prompt,
            most=(self.frames * self.preprocess.hop_length, self.text_context),
            augment=self.augment if split == "train" else None,
            seed=self.seed,
            together=self.batch_size * (self.trainer.world_size if self.trainer else 1),
            curriculum=self.curriculum,
            keep=self.in_memory,
        )

    def _samples(self, split: str) -> Samples:
        if self.name == "morse":
            return self._messages(split)
        chosen = self._splits[split]
        if not chosen:
            raise ValueError(f"data root {self.root}: no recording is left for {split}, expected more, or that split")
        if split == "test" and chosen is self._splits["val"]:
            rank_zero_warn(f"data root {self.root}: no recordings for testing, so val is tested on")
        return Recordings(chosen)

    def _messages(self, split: str) -> Samples:
        messages = Morse(split, self.num_messages)
        most = self.frames / self.preprocess.frames_per_second
        if messages.seconds[-1] > most:
            raise ValueError(
                f"model.audio_context is {self.audio_context}, which are {most:.1f} s, expected the "
                f"{messages.seconds[-1]:.1f} s of the longest message"
            )
        return messages

    @cached_property
    def _splits(self) -> dict[str, Any]:
        return self.complete(self._found, lambda recording: None)

    @cached_property
    def _found(self) -> Found:
        assert self.root is not None
        rate, root = self.preprocess.frames_per_second, Path(self.root)
        limits = Limits(1 / rate, self.frames / rate)
        if self.name == "table":
            return sources.read_table(root, self.table, limits)
        readers: dict[str, Callable[[Path, Limits], Found]] = {
            "folder": sources.read_folder,
            "librispeech": sources.read_librispeech,
            "speechcommands": sources.read_speech_commands,
        }
        assert self.name is not None
        return readers[self.name](root, limits)


def _named(dataset: DatasetName | None, root: str | None, source: str | None) -> DatasetName:
    """Which data set it is, as far as a look at its folder tells."""
    if root is None:
        if dataset in (None, "morse"):
            return "morse"
        told = f"; the data come from {source}" if source else ""
        raise ValueError(f"data.root is missing, expected --data.root FOLDER for data.dataset {dataset}{told}")
    if dataset == "morse":
        raise ValueError(f"data.root is {root} and data.dataset morse, which needs none: expected one of them")
    place = Path(root)
    if not place.is_dir():
        found = "a file" if place.exists() else "no such folder"
        raise ValueError(f"data root {root}: {found}, expected a folder of recordings")
    if dataset is not None:
        return dataset
    for name, folder in (("librispeech", "LibriSpeech"), ("speechcommands", "SpeechCommands")):
        if (place / folder).is_dir():
            return name  # type: ignore[return-value]
    tables = [path for path in place.iterdir() if path.suffix.lower() in sources.SUFFIXES]
    return "table" if tables else "folder"
