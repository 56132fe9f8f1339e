"""A folder for Hugging Face's Whisper and for CTranslate2, with the tokenizer and what generation has to know."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models.whisper import Whisper
from multimodal.pretrained import Checkpoint, load, read
from tasks.whisper.huggingface import write_folder
from tests.parity.keys import assert_close
from tests.parity.whisper import tiny

TEXT = " And so, my fellow Americans: 客観 😀 don't"


def exported(folder: Path, *, multilingual: bool) -> tuple[Whisper, SpeechTokenizer]:
    record = {"multilingual": multilingual, "num_languages": 99}
    model = tiny(num_mels=80, vocab_size=51864 + multilingual, audio_context=1500)
    write_folder(Checkpoint.of("whisper", model, tokenizer=record), folder)
    return model, SpeechTokenizer.from_record(record)


@pytest.mark.parametrize("multilingual", [False, True])
def test_transformers_takes_model_and_tokenizer(multilingual: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("whisper")
    model, tokenizer = exported(tmp_path, multilingual=multilingual)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT, add_special_tokens=False).input_ids == tokenizer.encode(TEXT)
    module = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    says = module.generation_config
    published = transformers.models.whisper.configuration_whisper
    silent = published.NON_SPEECH_TOKENS_MULTI if multilingual else published.NON_SPEECH_TOKENS
    assert set(silent) <= set(says.suppress_tokens)
    assert says.begin_suppress_tokens == [220, tokenizer.end]
    assert (says.decoder_start_token_id, says.eos_token_id) == (tokenizer.start, tokenizer.end)
    assert says.is_multilingual == multilingual
    mel = torch.randn(1, 80, 3000)
    options: dict[str, Any] = {"language": "de", "task": "translate"} if multilingual else {}
    tokens = module.generate(mel, max_new_tokens=5, **options)[0].tolist()
    prompt = tokenizer.prompt("de", task="translate", timestamps=False)
    if tokens[: len(prompt)] == prompt:  # some versions return it
        tokens = tokens[len(prompt) :]
    with torch.no_grad():
        logits = model(mel, torch.tensor([prompt]))[0, -1]
    logits[[*says.suppress_tokens, *says.begin_suppress_tokens]] = -torch.inf
    assert tokens[0] == int(logits.argmax())


def test_the_folder_comes_back(tmp_path: Path) -> None:
    pytest.importorskip("whisper")
    model, tokenizer = exported(tmp_path, multilingual=True)
    loaded = load(tmp_path, task="whisper")
    mel, tokens = torch.randn(1, 80, 50), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert_close(loaded.model(mel, tokens), model(mel, tokens))
    again = SpeechTokenizer.from_record(loaded.tokenizer)
    assert again.multilingual
    assert again.encode(TEXT) == tokenizer.encode(TEXT)


def test_ctranslate2_takes_it(tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    pytest.importorskip("whisper")
    exported(tmp_path / "hf", multilingual=True)
    converter = ctranslate2.converters.TransformersConverter(str(tmp_path / "hf"))
    converter.convert(str(tmp_path / "ct2"))
    assert ctranslate2.models.Whisper(str(tmp_path / "ct2")).is_multilingual


def test_without_a_tokenizer_only_the_model_is_written(tmp_path: Path) -> None:
    write_folder(Checkpoint.of("whisper", tiny()), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    assert read(tmp_path).tokenizer is None
