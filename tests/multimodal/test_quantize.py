"""Whisper in int8: close to float32, the same in any batch, refused where it was not tried, never saved."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from multimodal import quantize as quantized
from multimodal.blocks import StackConfig
from multimodal.models.whisper import Whisper, WhisperConfig
from multimodal.quantize import HOLDS_FOR, Int8Head, Int8Linear, quantize
from tests.parity.keys import randomize

STACK = StackConfig(embed_dim=64, depth=2, num_heads=2)


def build() -> Whisper:
    torch.manual_seed(0)
    config: dict[str, Any] = {"num_mels": 8, "audio_context": 20, "text_context": 10, "vocab_size": 100}
    model = Whisper(WhisperConfig(**config, encoder=STACK, decoder=STACK)).eval()
    randomize(model)
    return model


HERE = torch.__version__.startswith("2.14.") and torch.cpu.get_capabilities().get("avx512_vnni", False)
here = pytest.mark.skipif(not HERE, reason=f"int8 is for {HOLDS_FOR}")


@torch.inference_mode()
def logits(model: Whisper, rows: slice = slice(None)) -> torch.Tensor:
    """[B, 6, V], of a prompt of three tokens and three steps."""
    generator = torch.Generator().manual_seed(1)
    mel = torch.randn(4, 8, 40, generator=generator) * torch.tensor([0.1, 1.0, 3.0, 10.0])[:, None, None]
    tokens = torch.randint(100, (4, 6), generator=generator)[rows]
    cache = model.make_cache()
    found = [model.decode(tokens[:, :3], model.encode(mel[rows]), cache=cache)]
    found += [model.decode(tokens[:, at : at + 1], cache=cache) for at in range(3, 6)]
    return torch.cat(found, dim=1)


@here
@pytest.mark.parametrize("least", [0, 2_000_000], ids=["all Linears", "those that pay"])
def test_logits_are_close(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """Within 5 % of the spread of the logits: each product is wrong by some 1 %, and ten or so follow each other."""
    monkeypatch.setattr(quantized, "_LEAST_WEIGHTS", least)
    model = build()
    expected = logits(model)
    quantize(model)
    error = logits(model) - expected
    assert 0 < error.std() <= 0.05 * expected.std()


@here
def test_every_linear_that_pays_is_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    quantize(model)
    assert isinstance(model.step_head, Int8Head)
    assert model.step_head.product.int8.dtype == torch.int8
    left = {path for path, layer in model.named_modules() if type(layer) is nn.Linear}
    parts = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    parts += ["cross_attn.q_proj", "cross_attn.out_proj", "mlp.fc1", "mlp.fc2"]
    assert left == {f"decoder.blocks.{block}.{part}" for block in range(2) for part in parts}
    made = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    assert len(made) == 2 * 6 + 2 * 2
    assert {layer.product.int8.dtype for layer in made} == {torch.int8}
    assert all(parameter.dim() == 1 for layer in made for parameter in layer.parameters())
    monkeypatch.setattr(quantized, "_LEAST_WEIGHTS", 0)
    quantize(model)
    assert not any(type(layer) is nn.Linear for layer in model.modules())


@here
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    model = build()
    quantize(model)
    together = logits(model)
    for row in range(4):
        alone = logits(model, slice(row, row + 1))[0]
        assert (alone - together[row]).abs().max() <= 0.02 * together.std()


@here
@pytest.mark.parametrize("rows", [1, 8, 300])
def test_a_product_is_exact_where_all_are_whole_numbers(rows: int) -> None:
    """At the ends of the range: int16 sums, as of processors without VNNI, would overflow."""
    layer = nn.Linear(256, 40)
    x = 127 * torch.randint(-1, 2, (rows, 256)).float()
    x[:, 0] = 127
    with torch.no_grad():
        layer.weight.copy_(127 * torch.ones(40, 256))
        expected = layer.double()(x.double())
        found = Int8Linear(layer.float())(x)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    with torch.no_grad():
        assert torch.equal(Int8Linear(layer)(torch.zeros(2, 256)), layer.bias.expand(2, 40))


@here
def test_an_int8_model_is_not_saved() -> None:
    model = build()
    quantize(model)
    with pytest.raises(ValueError, match=r"^an int8 model is for inference, expected the model that it was made of$"):
        model.state_dict()


def refusal(model: Whisper) -> str:
    before = [type(layer) for layer in model.modules()]
    with pytest.raises(ValueError, match=f"^int8: .*, expected {re.escape(HOLDS_FOR)}$") as caught:
        quantize(model)
    assert [type(layer) for layer in model.modules()] == before
    return str(caught.value).split(",")[0]


def test_what_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(build().to("meta")) == "int8: float32 on meta"
    assert refusal(build().bfloat16()) == "int8: bfloat16 on cpu"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.0")
        assert refusal(build()) == "int8: torch 2.9.0"
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert refusal(build()) == "int8: a CPU without it"
