"""Whisper's tokenizers: text to tokens and back, and the special tokens that say what is to be done.

All are tokenizers of the `tokenizers` library, be they a published tokenizer.json, OpenAI's own table, or characters
alone; so a checkpoint holds one as plain data.
"""

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, START = "<|endoftext|>", "<|startoftranscript|>"
TRANSLATE, TRANSCRIBE, PREVIOUS, NO_TIMESTAMPS = "translate", "transcribe", "startofprev", "notimestamps"
_AFTER_LANGUAGES = (TRANSLATE, TRANSCRIBE, "startoflm", PREVIOUS, "nospeech", NO_TIMESTAMPS)
NUM_TIMESTAMPS = 1501
"""Timestamp tokens of the published models: every 0.02 s from 0 to 30 s."""
# Languages that are written without spaces: each character may be a word of its own.
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
# What transcripts have around words that are not said: marks of speakers and noises, music, quotes, brackets.
_MARKS = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』', "<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("']
_MARKS += ["((", "))", "(((", ")))", "[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
_MUSIC = "♩♪♫♬♭♮♯"


class SpeechTokenizer:
    """Text and tokens.

    Args:
        tokenizer: of the `tokenizers` library, with Whisper's special tokens.
        multilingual: whether a prompt names language and task, as for all published models but those for English.

    Raises:
        ValueError: a special token is missing.
    """

    def __init__(self, tokenizer: Tokenizer, *, multilingual: bool) -> None:
        self.tokenizer = tokenizer
        self.multilingual = multilingual
        tokenizer.encode_special_tokens = True  # a text that spells a special token is but a text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.end = self._special(END)
        self.start = self._special(START)
        self.translate, self.transcribe, self.language_model, self.previous = (
            self._special(f"<|{name}|>") for name in _AFTER_LANGUAGES[:4]
        )
        self.no_speech = self._special("<|nospeech|>", "<|nocaptions|>")
        self.no_timestamps = self._special("<|notimestamps|>")
        self.timestamps = self.no_timestamps + 1
        """The token of 0.00 s, behind which the others follow."""

    def _special(self, *names: str) -> int:
        for name in names:
            if (token := self.tokenizer.token_to_id(name)) is not None:
                return token
        raise ValueError(f"the tokenizer has no token {names[0]}, expected one of a Whisper")

    # ---------------------------------------------------------------------------------------------------- as plain data

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the form that checkpoints hold."""
        return {"multilingual": self.multilingual, "tokenizer": json.loads(self.tokenizer.to_str())}

    @classmethod
    def from_record(cls, record: Any) -> "SpeechTokenizer":
        """The reverse of `to_dict`, or a record that names one of OpenAI's tables by the number of its languages.

        Raises:
            ValueError: it is neither; or OpenAI's tables are not installed.
        """
        keys = set(record) if isinstance(record, Mapping) else set()
        if keys == {"multilingual", "num_languages"}:
            return cls.from_openai(**record)
        if keys != {"multilingual", "tokenizer"}:
            raise ValueError(f"tokenizer record {record!r:.80}: expected multilingual and tokenizer")
        try:
            tokenizer = Tokenizer.from_str(json.dumps(record["tokenizer"]))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer record: {' '.join(str(error).split())}, expected a tokenizer.json") from error
        return cls(tokenizer, multilingual=bool(record["multilingual"]))

    @classmethod
    def from_file(cls, path: Path, *, multilingual: bool) -> "SpeechTokenizer":
        """A tokenizer.json; ValueError naming the file for anything else."""
        try:
            return cls(Tokenizer.from_file(str(path)), multilingual=multilingual)
        except Exception as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}, expected Whisper's tokenizer.json") from error

    @classmethod
    def from_openai(cls, *, multilingual: bool, num_languages: int = 99) -> "SpeechTokenizer":
        """The table that comes with openai-whisper; ValueError where that package is not installed."""
        if find_spec("whisper") is None:
            raise ValueError("no tokenizer.json, and openai-whisper, which has one as well, is not installed")
        from whisper.tokenizer import get_encoding

        encoding = get_encoding("multilingual" if multilingual else "gpt2", num_languages)
        ranks = {bytes(token): rank for token, rank in encoding._mergeable_ranks.items()}
        special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
        return cls(_byte_pairs(ranks, [name for name, _ in special]), multilingual=multilingual)

    @classmethod
    def from_characters(
        cls, characters: Iterable[str], *, languages: Sequence[str] = (), num_timestamps: int = 0
    ) -> "SpeechTokenizer":
        """A small one for training from scratch: a token for each character, and the special ones.

        Args:
            characters: of which texts consist.
            languages: codes such as `en`; with none, prompts name neither language nor task.
            num_timestamps: tokens for times, every 0.02 s from 0.
        """
        alphabet = sorted(set(characters))
        tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
        tokenizer.decoder = decoders.Fuse()
        names = [END, START, *(f"<|{name}|>" for name in (*languages, *_AFTER_LANGUAGES))]
        names += [f"<|{index * 0.02:.2f}|>" for index in range(num_timestamps)]
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
        return cls(tokenizer, multilingual=bool(languages))

    # ------------------------------------------------------------------------------------------------------------- text

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; a published model has the timestamps as well, which some files leave out."""
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; ValueError for a character that the tokenizer does not have."""
        if unknown := self.unknown(text):
            raise ValueError(f"character {unknown[0]!r} is not among those of the tokenizer")
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    @property
    def spells(self) -> bool:
        """Whether each token is one character; published tokenizers write any text, words with the space before."""
        return isinstance(self.tokenizer.decoder, decoders.Fuse)

    def unknown(self, text: str) -> str:
        """The characters of a text that have no token, which encoding by itself would leave out."""
        return "".join(one for one in text if self.tokenizer.token_to_id(one) is None) if self.spells else ""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones and timestamps."""
        return self.tokenizer.decode([token for token in tokens if self.is_text(token)], skip_special_tokens=False)

    def is_text(self, token: int) -> bool:
        """Whether a token is text. The special tokens and timestamps come last in every Whisper's vocabulary."""
        return token < self.end

    @cached_property
    def languages(self) -> dict[str, int]:
        """The token of each language's code, in their order."""
        tokens = range(self.start + 1, min(self.translate, self.transcribe))
        names = [self.tokenizer.id_to_token(token) for token in tokens]
        return {name.strip("<|>"): token for name, token in zip(names, tokens, strict=True) if name}

    def prompt(self, language: str | None = None, *, task: str = TRANSCRIBE, timestamps: bool = True) -> list[int]:
        """What a transcript begins with; ValueError for a language that the tokenizer does not have."""
        tokens = [self.start]
        if self.multilingual:
            if language not in self.languages:
                raise ValueError(f"language {language!r}, expected one of {', '.join(self.languages)}")
            tokens += [self.languages[language], self.translate if task == TRANSLATE else self.transcribe]
        return tokens if timestamps else [*tokens, self.no_timestamps]

    @property
    def only_in_prompts(self) -> list[int]:
        """Tokens that no transcript has."""
        return [self.start, self.translate, self.transcribe, self.language_model, self.previous, self.no_speech]

    @cached_property
    def blank(self) -> list[int]:
        """The tokens of a single space, none where there is no space."""
        return self.tokenizer.encode(" ", add_special_tokens=False).ids

    @cached_property
    def not_spoken(self) -> list[int]:
        """Tokens of marks that transcripts have around words, without those that punctuate sentences.

        As in the published code a hyphen and an apostrophe are only taken at the beginning of a word, and a sign of
        music by its first token, which it shares with others of its kind. Where tokens are characters there are none:
        these are what the texts consist of.
        """
        if self.spells:
            return []

        def tokens(text: str) -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=False).ids

        found = {*tokens(" -")[:1], *tokens(" '")[:1]}
        for mark in _MARKS:
            found.update(*(ids for ids in (tokens(mark), tokens(f" {mark}")) if len(ids) == 1))
        for sign in _MUSIC:
            found.update(tokens(sign)[:1], tokens(f" {sign}")[:1])
        return sorted(found)

    def words(self, tokens: Sequence[int], language: str | None = None) -> list[tuple[str, list[int]]]:
        """Words, each with its tokens, and the punctuation that is a word here; the text must be whole characters.

        A language that is written without spaces is divided into characters.
        """
        parts = self._characters(tokens)
        if language in _WITHOUT_SPACES:
            return parts
        words: list[tuple[str, list[int]]] = []
        for text, ids in parts:
            own = ids[0] >= self.end or text.startswith(" ") or text.strip() in string.punctuation
            if own or not words:
                words.append((text, ids))
            else:
                words[-1] = (words[-1][0] + text, words[-1][1] + ids)
        return words

    def _characters(self, tokens: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The shortest runs of tokens that are whole characters."""
        whole = self._spell(tokens)
        runs: list[tuple[str, list[int]]] = []
        waiting: list[int] = []
        done = 0
        for token in tokens:
            waiting.append(token)
            text = self._spell(waiting)
            broken = text.find("\ufffd")
            # A replacement character that stands in the whole text as well is no half of one.
            if broken < 0 or whole[done + broken : done + broken + 1] == "\ufffd":
                runs.append((text, waiting))
                waiting, done = [], done + len(text)
        return runs

    def _spell(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def _byte_pairs(ranks: Mapping[bytes, int], special: Sequence[str]) -> Tokenizer:
    """GPT-2's kind of tokenizer from a table of byte strings, by whose ranks neighbours are merged."""
    letters = _byte_letters()

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [(rank, ranks[left], spelled(left), spelled(right)) for left, right in pairs]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(left, right) for _, _, left, right in sorted(merges)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter by which the library writes each byte: itself where that can be seen, else one from 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
