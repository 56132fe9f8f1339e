"""CLIP's tokenizer: equal to open_clip's, but for padding that no batch needs."""

from typing import Any

import open_clip
import pytest
import torch

from multimodal.data import CLIPTokenizer, tokenizer_from

TEXTS = [
    "",
    " \n",
    "a red car",
    "A  Red CAR",
    "😀 你好",
    "naïve &amp; café <end_of_text> after",
    "word " * 300,
    "\x00\u200d",
]


@pytest.mark.parametrize("context_length", [77, 8, 3, 2])
def test_the_same_tokens_as_open_clip(context_length: int) -> None:
    found = CLIPTokenizer(context_length)(TEXTS)
    expected = open_clip.tokenize(TEXTS, context_length)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected[:, : found.shape[1]])
    assert not expected[:, found.shape[1] :].any()


def test_a_batch_is_as_long_as_its_longest() -> None:
    tokenizer = CLIPTokenizer()
    assert tokenizer(["a red car", ""]).tolist() == [[49406, 320, 736, 1615, 49407], [49406, 49407, 0, 0, 0]]
    assert tokenizer([""]).shape == (1, 2)
    assert tokenizer([]).shape == (0, 0)


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_begins_and_ends(text: str) -> None:
    tokenizer = CLIPTokenizer(12)
    (row,) = tokenizer([text])
    assert row[0] == 49406
    assert row[-1] == tokenizer.end_token
    assert 2 <= len(row) <= 12
    assert row.max() < tokenizer.vocab_size


def test_a_record_brings_it_back() -> None:
    record = CLIPTokenizer(20).to_dict()
    assert record == {"kind": "clip_bpe", "context_length": 20}
    assert tokenizer_from(record).context_length == 20


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "m.ckpt: its tokenizer is None, expected one of kind 'clip_bpe'"),
        ({"kind": "whisper"}, "m.ckpt: its tokenizer is {'kind': 'whisper'}, expected one of kind"),
        ({"kind": "clip_bpe"}, "m.ckpt: its tokenizer has context_length None, expected a number from 2 on"),
        (
            {"kind": "clip_bpe", "context_length": 1},
            "m.ckpt: its tokenizer has context_length 1, expected a number from 2 on",
        ),
    ],
)
def test_records_that_describe_none(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        tokenizer_from(record, "m.ckpt")
    assert message in str(caught.value)


def test_a_length_that_holds_no_text() -> None:
    with pytest.raises(ValueError, match="context_length is 1, expected at least 2"):
        CLIPTokenizer(1)
