"""What is measured of transcripts: word and character error rates, by jiwer."""

from collections.abc import Callable, Sequence
from typing import Literal

import jiwer
import torch
from torch import Tensor
from torchmetrics import Metric

Normalization = Literal["none", "basic", "english"]


def normalizer(name: Normalization) -> Callable[[str], str]:
    """What is done to texts before they are compared (Radford et al. 2022, appendix C).

    Args:
        name: none; basic, lower case without punctuation, for any language; english, which besides spells numbers and
            words in one way.

    Raises:
        ValueError: openai-whisper, whose normalizers they are, is not installed.
    """
    if name == "none":
        return str
    try:
        from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer
    except ModuleNotFoundError as error:
        raise ValueError(f"model.normalize {name} needs openai-whisper: pip install openai-whisper") from error
    return EnglishTextNormalizer() if name == "english" else BasicTextNormalizer()


class ErrorRates(Metric):
    """Words and characters that are wrong, missing or too many, over those of the references: `wer` and `cer`.

    Over all texts together, not the mean of each text's rate; absent where the references have none.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, normalize: Normalization = "none") -> None:
        super().__init__()
        self.normalize = normalizer(normalize)
        self.add_state("counts", torch.zeros(4, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            said, right = (" ".join(self.normalize(text).split()) for text in (hypothesis, reference))
            self.counts += torch.tensor([*_words(said, right), *_characters(said, right)], device=self.counts.device)

    def compute(self) -> dict[str, Tensor]:
        wrong_words, words, wrong_characters, characters = self.counts
        if not words:
            return {}
        return {"wer": (wrong_words / words).float(), "cer": (wrong_characters / characters).float()}


def _words(said: str, right: str) -> tuple[float, float]:
    """How many words are wrong, and how many there are."""
    if not right:  # which jiwer refuses
        return len(said.split()), 0
    out = jiwer.process_words(right, said)
    return out.substitutions + out.deletions + out.insertions, out.substitutions + out.deletions + out.hits


def _characters(said: str, right: str) -> tuple[float, float]:
    if not right:
        return len(said), 0
    out = jiwer.process_characters(right, said)
    return out.substitutions + out.deletions + out.insertions, out.substitutions + out.deletions + out.hits
