"""Whisper's encoder and decoder, HF's and OpenAI's: full and cached, with cross-attention computed once."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperModel
from whisper.model import ModelDimensions, Whisper, sinusoids

from multimodal.blocks import Stack, StackConfig, sinusoid
from tests.parity.keys import (
    assert_close,
    assert_same_gradients,
    assert_same_initialisation,
    backward_alike,
    final_norm,
    gradients,
    randomize,
    to_blocks,
)

HF = {
    **{f"self_attn.{part}_proj": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "self_attn_layer_norm": "self_attn_residual.norm",
    **{f"encoder_attn.{part}_proj": f"cross_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "encoder_attn_layer_norm": "cross_attn_residual.norm",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
    "final_layer_norm": "mlp_residual.norm",
}
OPENAI = {
    **{f"attn.{long}": f"self_attn.{long[0]}_proj" for long in ("query", "key", "value")},
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_residual.norm",
    **{f"cross_attn.{long}": f"cross_attn.{long[0]}_proj" for long in ("query", "key", "value")},
    "cross_attn.out": "cross_attn.out_proj",
    "cross_attn_ln": "cross_attn_residual.norm",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
    "mlp_ln": "mlp_residual.norm",
}
CONFIG = StackConfig(embed_dim=32, depth=2, num_heads=4, key_bias=False, init="whisper")
FRAMES, TOKENS, VOCAB = 6, 9, 11
CHUNKS = ((0, 3), (3, 4), (4, 5), (5, TOKENS))  # a prefill, two steps of one token, a chunk of four


class HuggingFace:
    """HF's Whisper with its stacks' inputs and outputs laid bare."""

    def __init__(self, width: int = 32) -> None:
        config = WhisperConfig(
            vocab_size=VOCAB, num_mel_bins=4, d_model=width, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
            max_source_positions=FRAMES, max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        )  # fmt: skip
        self.model = WhisperModel(config)

    def encode(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model.encoder(mel, output_hidden_states=True)
        return out.hidden_states[0].detach(), out.last_hidden_state

    def embed(self, tokens: Tensor) -> Tensor:
        decoder = self.model.decoder
        return (decoder.embed_tokens(tokens) + decoder.embed_positions.weight[: tokens.shape[1]]).detach()

    def decode(self, tokens: Tensor, context: Tensor) -> Tensor:
        return self.model.decoder(tokens, encoder_hidden_states=context).last_hidden_state

    def decode_cached(self, tokens: Tensor, context: Tensor) -> Iterator[Tensor]:
        cache = None
        for start, end in CHUNKS:
            out = self.model.decoder(tokens[:, start:end], encoder_hidden_states=context, use_cache=True, cache=cache)
            cache = out.cache
            yield out.last_hidden_state

    def convert(self, side: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return to_blocks(state, f"{side}.layers", HF) | final_norm(state, f"{side}.layer_norm")


class OpenAI:
    """OpenAI's Whisper with its stacks' inputs and outputs laid bare."""

    def __init__(self) -> None:
        self.model = Whisper(ModelDimensions(4, FRAMES, 32, 4, 2, VOCAB, 12, 32, 4, 2))
        nn.init.normal_(self.model.decoder.positional_embedding)  # it comes uninitialised
        self.captured: dict[str, Tensor] = {}
        self.model.encoder.blocks[0].register_forward_pre_hook(lambda _, args: self.captured.update(embedded=args[0]))
        self.model.decoder.ln.register_forward_hook(lambda *args: self.captured.update(decoded=args[2]))

    def encode(self, mel: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model.encoder(mel)
        return self.captured["embedded"].detach(), out

    def embed(self, tokens: Tensor) -> Tensor:
        decoder = self.model.decoder
        return (decoder.token_embedding(tokens) + decoder.positional_embedding[: tokens.shape[1]]).detach()

    def decode(self, tokens: Tensor, context: Tensor) -> Tensor:
        self.model.decoder(tokens, context)
        return self.captured["decoded"]

    def decode_cached(self, tokens: Tensor, context: Tensor) -> Iterator[Tensor]:
        cache, hooks = self.model.install_kv_cache_hooks()
        chunks = CHUNKS[:3]  # its mask is aligned at the top left: a chunk after a prefill is wrong there
        for start, end in chunks:
            self.model.decoder(tokens[:, start:end], context, kv_cache=cache)
            yield self.captured["decoded"]
        for hook in hooks:
            hook.remove()
        yield self.decode(tokens, context)[:, CHUNKS[3][0] :]

    def convert(self, side: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        norm = {"encoder": "encoder.ln_post", "decoder": "decoder.ln"}[side]
        return to_blocks(state, f"{side}.blocks", OPENAI) | final_norm(state, norm)


@pytest.fixture(params=[HuggingFace, OpenAI])
def theirs(request: pytest.FixtureRequest) -> HuggingFace | OpenAI:
    theirs = request.param()
    randomize(theirs.model)
    return theirs


def build(theirs: HuggingFace | OpenAI, side: str) -> Stack:
    decoder = {"causal": True, "context_dim": 32} if side == "decoder" else {}
    ours = Stack(CONFIG, **decoder).eval()
    ours.load_state_dict(theirs.convert(side, theirs.model.state_dict()))
    return ours


def test_encoder(theirs: HuggingFace | OpenAI) -> None:
    ours = build(theirs, "encoder")
    embedded, expected = theirs.encode(torch.randn(2, 4, 2 * FRAMES))
    actual = ours(embedded).last
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, theirs.convert("encoder", gradients(theirs.model)))


def test_decoder(theirs: HuggingFace | OpenAI) -> None:
    ours = build(theirs, "decoder")
    tokens, context = torch.randint(VOCAB, (2, TOKENS)), torch.randn(2, FRAMES, 32)
    actual, expected = ours(theirs.embed(tokens), context).last, theirs.decode(tokens, context)
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, theirs.convert("decoder", gradients(theirs.model)))


@torch.no_grad()
def test_decoder_cached(theirs: HuggingFace | OpenAI) -> None:
    ours = build(theirs, "decoder")
    tokens, context = torch.randint(VOCAB, (2, TOKENS)), torch.randn(2, FRAMES, 32)
    embedded, cache = theirs.embed(tokens), ours.make_cache(12)
    projections = []
    ours.blocks[0].cross_attn.k_proj.register_forward_hook(lambda *_: projections.append(1))
    for (start, end), expected in zip(CHUNKS, theirs.decode_cached(tokens, context), strict=True):
        assert_close(ours(embedded[:, start:end], context if start == 0 else None, cache=cache).last, expected)
    assert len(projections) == 1  # the context's keys are computed once


def test_initialisation() -> None:
    theirs = HuggingFace(width=128)
    config = StackConfig(embed_dim=128, depth=2, num_heads=4, key_bias=False, init="whisper")
    ours = Stack(config, context_dim=128)
    assert_same_initialisation(ours, theirs.convert("decoder", theirs.model.state_dict()))


def test_encoder_positions() -> None:
    assert_close(sinusoid(50, 32, "whisper"), sinusoids(50, 32))
