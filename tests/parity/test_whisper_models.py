"""Whole Whispers against OpenAI's and Hugging Face's, weights in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from multimodal.data.speech_text import SpeechTokenizer
from multimodal.models.whisper import Whisper
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.hf_whisper import to_hf
from multimodal.pretrained.openai_whisper import to_openai
from tests.parity.keys import assert_close
from tests.parity.whisper import DIMS, hugging_face, inputs, openai, tiny

CHUNKS = ((0, 4), (4, 5), (5, 6), (6, 9))  # a prefill, two steps of one token, a chunk


@torch.no_grad()
def assert_same(ours: Whisper, theirs: Any, num_mels: int = 8) -> None:
    """Equal audio tokens and logits, also when decoded with a cache."""
    mel, tokens = inputs(num_mels)
    if hasattr(theirs, "dims"):
        audio, logits = theirs.encoder(mel), theirs(mel, tokens)
    else:
        out = theirs(input_features=mel, decoder_input_ids=tokens)
        audio, logits = out.encoder_last_hidden_state, out.logits
    assert_close(ours.encode(mel), audio)
    assert_close(ours(mel, tokens), logits)
    cache = ours.make_cache()
    for start, end in CHUNKS:
        context = audio if start == 0 else None
        assert_close(ours.decode(tokens[:, start:end], context, cache=cache), logits[:, start:end])


@pytest.mark.parametrize("dims", [{}, {"n_mels": 128, "n_text_layer": 1}, {"n_audio_head": 2}], ids=str)
def test_openais_from_memory_and_from_its_file(dims: dict[str, int], tmp_path: Path) -> None:
    module = openai(**dims)
    torch.save({"dims": DIMS | dims, "model_state_dict": module.state_dict()}, tmp_path / "a.pt")
    for source in (module, tmp_path / "a.pt"):
        loaded = load(source, task="whisper")
        assert_same(loaded.model, module, num_mels=dims.get("n_mels", 8))
        assert loaded.preprocess == {
            "num_mels": dims.get("n_mels", 8), "sample_rate": 16000, "fft_size": 400, "hop_length": 160,
            "mean": 0.0, "std": 1.0,
        }  # fmt: skip
    to_openai(read(module), tmp_path / "b.pt")
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert before["dims"] == after["dims"]
    assert before["model_state_dict"].keys() == after["model_state_dict"].keys()
    assert all(torch.equal(value, after["model_state_dict"][key]) for key, value in before["model_state_dict"].items())


def test_openais_own_reader_takes_an_export(tmp_path: Path) -> None:
    whisper = pytest.importorskip("whisper")
    ours = tiny()
    to_openai(Checkpoint.of("whisper", ours), tmp_path / "a.pt")
    assert_same(ours, whisper.load_model(str(tmp_path / "a.pt"), device="cpu").eval())


@pytest.mark.parametrize(
    "options",
    [{}, {"num_mel_bins": 128, "decoder_layers": 1}, {"encoder_ffn_dim": 40, "decoder_attention_heads": 2}],
    ids=str,
)
def test_hugging_faces_from_memory_and_from_its_folder(options: dict[str, Any], tmp_path: Path) -> None:
    module = hugging_face(**options)
    module.save_pretrained(tmp_path / "a")
    for source in (module, tmp_path / "a"):
        assert_same(load(source, task="whisper").model, module, options.get("num_mel_bins", 8))
    to_hf(read(tmp_path / "a"), tmp_path / "b")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    before.pop("proj_out.weight", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_transformers_takes_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = tiny(alignment_heads=((1, 0), (1, 3)))
    to_hf(Checkpoint.of("whisper", ours), tmp_path)
    module, info = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(ours, module.eval())
    assert module.generation_config.alignment_heads == [[1, 0], [1, 3]]
    assert read(tmp_path).config == read(module).config | {"alignment_heads": [[1, 0], [1, 3]]}
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(tmp_path)
    assert (extractor.feature_size, extractor.hop_length, extractor.n_fft) == (8, 160, 400)


def test_the_heads_that_tell_times_travel() -> None:
    module = openai()
    module.register_buffer("alignment_heads", torch.eye(3, 4).bool().to_sparse(), persistent=False)
    assert read(module).config["alignment_heads"] == [[0, 0], [1, 1], [2, 2]]
    assert tiny(decoder={"depth": 3}).config.aligned == tuple((layer, head) for layer in (1, 2) for head in range(4))


def test_the_tokenizer_lies_beside_the_weights(tmp_path: Path) -> None:
    of = SpeechTokenizer.from_characters("abc")
    torch.save({"dims": DIMS, "model_state_dict": openai().state_dict()}, tmp_path / "a.pt")
    to_hf(Checkpoint.of("whisper", tiny(), tokenizer=of.to_dict()), tmp_path / "hf")
    named = {"multilingual": False, "num_languages": DIMS["n_vocab"] - 51765}
    assert read(tmp_path / "a.pt").tokenizer == named
    assert read(tmp_path / "hf").tokenizer == of.to_dict()
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps({"added_tokens": [{"content": "[CLS]"}]}))  # of some other model
    assert read(tmp_path / "a.pt").tokenizer == named
    other.write_text((tmp_path / "hf/tokenizer.json").read_text())
    assert read(tmp_path / "a.pt").tokenizer == of.to_dict()


def test_faults_are_told_in_one_line(tmp_path: Path) -> None:
    state = openai().state_dict()

    def pt(name: str, dims: Any, weights: Any = state) -> Path:
        torch.save({"dims": dims, "model_state_dict": weights}, tmp_path / f"{name}.pt")
        return tmp_path / f"{name}.pt"

    def folder(name: str, file: str = "config.json", **changes: Any) -> Path:
        to_hf(Checkpoint.of("whisper", tiny()), tmp_path / name)
        path = tmp_path / name / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return tmp_path / name

    cases = {
        pt("few", {"n_mels": 8}): "dims {'n_mels': 8}, expected whole numbers n_audio_ctx, ",
        pt("text", DIMS | {"n_mels": "8"}): "expected whole numbers",
        pt("list", [1]): "expected dims and model_state_dict",
        pt("more", DIMS | {"n_text_layer": 4}): "missing decoder.blocks.3.attn.key.weight",
        pt("heads", DIMS | {"n_text_head": 5}): "embed_dim 32 is not a multiple of num_heads 5",
        folder("kind", architectures=["WhisperModel"]): "architecture 'WhisperModel', expected",
        folder("scaled", scale_embedding=True): "scale_embedding True, expected False",
        folder("act", activation_function="mish"): "activation_function 'mish', expected one of",
        folder("width", d_model="wide"): "its JSON files do not describe a Whisper (TypeError(",
        folder("hop", "preprocessor_config.json", hop_length=80): "hop_length 80, expected 160",
        folder("align", "generation_config.json", alignment_heads=[[9, 0]]): "alignment_heads has (9, 0), expected",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            read(path)
        assert message in str(caught.value), str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": {"norm_order": "post"}}, "encoder.norm_order 'post'"),
        ({"decoder": {"key_bias": True}}, "decoder.key_bias True"),
        ({"decoder": {"embed_dim": 16}}, "decoder.embed_dim 16"),
        ({"encoder": {"attention": "local", "attention_options": {"window": 4}}}, "encoder.attention 'local'"),
    ],
    ids=str,
)
def test_what_the_published_code_cannot_express_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.of("whisper", tiny(**changes))
    for write, name in ((to_openai, "openai-whisper"), (to_hf, "HF Whisper")):
        with pytest.raises(ValueError, match=f"^export to {name}: that format cannot express ") as caught:
            write(checkpoint, tmp_path / "out.pt")
        assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_published_name_that_is_none() -> None:
    pytest.importorskip("whisper")
    with pytest.raises(ValueError, match=r"^openai:huge: expected one of tiny\.en, tiny, base\.en, "):
        read("openai:huge")
