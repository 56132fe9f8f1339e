"""The decoding rules, against OpenAI's over random logits."""

from types import SimpleNamespace

import pytest
import torch

from multimodal.data.speech_text import SpeechTokenizer
from tasks.whisper.rules import Suppress, Timestamps, decoding_rules

BEGIN, END, SIZE = 20, 12, 40
PREFIXES = [
    [],
    [BEGIN],
    [BEGIN, 3],
    [BEGIN, 3, 5, BEGIN + 4],
    [BEGIN, 3, BEGIN + 4, BEGIN + 4],
    [BEGIN, 3, BEGIN + 4, BEGIN + 5],
    [BEGIN, 3, BEGIN + 4, BEGIN + 5, 7],
    [BEGIN + 19],
    [BEGIN + 3, 2, BEGIN + 19],
    [3, 4],
]


@pytest.mark.parametrize("prefix", PREFIXES, ids=str)
@pytest.mark.parametrize("latest", [None, 5])
def test_timestamps_as_openais(prefix: list[int], latest: int | None) -> None:
    decoding = pytest.importorskip("whisper.decoding")
    names = SimpleNamespace(no_timestamps=None, timestamp_begin=BEGIN, eot=END)
    theirs = decoding.ApplyTimestampRules(names, 2, latest)
    ours = Timestamps(BEGIN, END, latest)
    for scale in (0.5, 5.0):
        logits = scale * torch.randn(64, SIZE)
        generated = torch.tensor([prefix] * 64, dtype=torch.long).reshape(64, len(prefix))
        expected = logits.clone()
        theirs.apply(expected, torch.cat([torch.zeros(64, 2, dtype=torch.long), generated], dim=1))
        assert torch.equal(ours(logits, generated), expected)


def test_rows_of_a_batch_do_not_mix() -> None:
    prefixes = torch.tensor([row for row in PREFIXES if len(row) == 4])
    rule, logits = Timestamps(BEGIN, END), torch.randn(len(prefixes), SIZE)
    together = rule(logits.clone(), prefixes)
    for row in range(len(prefixes)):
        assert torch.equal(rule(logits[row : row + 1].clone(), prefixes[row : row + 1])[0], together[row])


def test_suppressed_tokens() -> None:
    rule = Suppress([1, 2], first=[5])
    logits = torch.zeros(2, 8)
    assert rule(logits.clone(), torch.zeros(2, 0, dtype=torch.long))[0].isinf().nonzero()[:, 0].tolist() == [1, 2, 5]
    assert rule(logits.clone(), torch.zeros(2, 1, dtype=torch.long))[1].isinf().nonzero()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("timestamps", [True, False])
def test_all_rules_as_openais(timestamps: bool) -> None:
    whisper = pytest.importorskip("whisper")
    from whisper.model import ModelDimensions

    dims = ModelDimensions(8, 1500, 16, 2, 1, 51865, 448, 16, 2, 1)
    options = whisper.DecodingOptions(language="en", without_timestamps=not timestamps, fp16=False)
    task = whisper.decoding.DecodingTask(whisper.model.Whisper(dims), options)
    tokenizer = SpeechTokenizer.from_openai(multilingual=True)
    rules = decoding_rules(tokenizer, timestamps=timestamps, suppress=None, latest=50)
    begin = tokenizer.timestamps
    for generated in ([], [begin], [begin, 440], [begin, 440, begin + 9]):
        rows = torch.tensor([generated], dtype=torch.long).reshape(1, -1)
        logits = torch.randn(1, 51865)
        expected = logits.clone()
        for one in task.logit_filters:
            one.apply(expected, torch.cat([torch.tensor([task.initial_tokens]), rows], dim=1))
        for rule in rules:
            logits = rule(logits, rows)
        assert torch.equal(logits, expected)
