"""Texts to tokens.

B batch, N tokens
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PADDING = 0
"""The token behind a text's end, which no model looks at."""
_KIND = "clip_bpe"


class CLIPTokenizer:
    """CLIP's byte-pair tokens, by open_clip ("Learning Transferable Visual Models…", Radford et al. 2021, section 2.4).

    Any text has tokens, the empty one too: those that begin and end it. Upper and lower case are alike.

    Args:
        context_length: most tokens of a text, with these two.
    """

    vocab_size = 49408
    end_token = 49407

    def __init__(self, context_length: int = 77) -> None:
        if context_length < 2:
            raise ValueError(f"context_length is {context_length}, expected at least 2")
        self.context_length = context_length

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Tokens int64 [B, N], where N is the longest of the batch; shorter texts are padded with zeros.

        A text that has more than `context_length` tokens loses its last ones, but not the one that ends it.
        """
        rows = [self._encode(text) for text in texts]
        tokens = torch.full((len(rows), max(map(len, rows), default=0)), PADDING)
        for row, found in zip(tokens, rows, strict=True):
            row[: len(found)] = torch.tensor(found)
        return tokens

    def _encode(self, text: str) -> list[int]:
        bpe = _bpe()
        found: list[int] = bpe.encode(text)[: self.context_length - 2]
        return [bpe.sot_token_id, *found, bpe.eot_token_id]

    def to_dict(self) -> dict[str, Any]:
        """As plain data: what a checkpoint holds as its `tokenizer`."""
        return {"kind": _KIND, "context_length": self.context_length}


@cache
def _bpe() -> Any:
    from open_clip.tokenizer import SimpleTokenizer  # imports half of open_clip

    return SimpleTokenizer()


def tokenizer_from(record: Any, where: str = "tokenizer") -> CLIPTokenizer:
    """The tokenizer that a checkpoint's record describes; ValueError, beginning with `where`, where that is none."""
    if not isinstance(record, Mapping) or record.get("kind") != _KIND:
        raise ValueError(f"{where}: its tokenizer is {record!r:.80}, expected one of kind {_KIND!r}")
    length = record.get("context_length")
    if type(length) is not int or length < 2:
        raise ValueError(f"{where}: its tokenizer has context_length {length!r:.80}, expected a number from 2 on")
    return CLIPTokenizer(length)
