"""CLIP by itself: what the parity tests do not see."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.models.clip import CLIP, CLIPConfig, TextConfig, TextTower
from multimodal.pretrained import build_config, plain_config
from multimodal.pretrained.record import structure
from tests.parity.clip import END, LENGTH, batch, randomize, tiny
from tests.parity.keys import assert_close


def loss_of(model: CLIP, micro_batch: int | None = None) -> Tensor:
    out = model(*batch(), micro_batch=micro_batch)
    return (out.logit_scale * out.image_features @ out.text_features.T).log_softmax(1).diagonal().sum()


def test_a_batch_may_end_with_its_longest_text() -> None:
    """Behind the end nothing counts: not how far the padding goes, nor what stands there."""
    model = randomize(tiny())
    tokens = torch.tensor([[5, 6, END], [7, END, 0]])
    expected = model.encode_text(tokens)
    for tail in (0, 3, END):
        longer = torch.cat([tokens, torch.full((2, LENGTH - 3), tail)], dim=1)
        assert_close(model.encode_text(longer), expected)
    changed = tokens.clone()
    changed[0, 0] = 9
    assert (model.encode_text(changed)[0] - expected[0]).abs().max() > 1e-3


@pytest.mark.parametrize("attention", ["auto", "naive", "sdpa"])
def test_the_last_block_computes_one_token(attention: str) -> None:
    """The same as all tokens and the one that counts of them, for any kernel."""
    model = randomize(tiny(text={"attention": attention}))
    _, tokens = batch()
    tower = model.text
    every = tower.encoder(tower.token_embed(tokens) + tower.position(LENGTH)).last
    ends = (tokens == END).int().argmax(dim=1)
    assert_close(tower(tokens), every[torch.arange(3), ends])
    seen = []
    tower.encoder.blocks[-1].mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape))
    tower(tokens)
    assert seen == [(3, 1, 24)]


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
def test_micro_batches_give_the_gradients_of_the_whole_batch(micro_batch: int) -> None:
    whole, parts = randomize(tiny()).train(), tiny().train()
    parts.load_state_dict(whole.state_dict())
    for model, size in ((whole, None), (parts, micro_batch)):
        torch.manual_seed(3)
        loss_of(model, size).backward()
    for a, b in zip(parts.parameters(), whole.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert_close(a.grad, b.grad)


def test_micro_batches_draw_dropout_once() -> None:
    """Recomputed with the masks of the forward pass: the gradient fits the loss that was returned."""
    model = randomize(tiny(vision={"dropout": 0.3}, text={"dropout": 0.3})).double().train()
    images, tokens = batch()

    def loss() -> Tensor:
        torch.manual_seed(5)
        return model(images.double(), tokens, micro_batch=2).image_features[:, 0].sum()

    loss().backward()
    weight = model.vision_proj.weight
    assert weight.grad is not None
    gradient = weight.grad[0, 0].item()
    with torch.enable_grad():
        weight.data[0, 0] += 1e-5
        above = loss().item()
        weight.data[0, 0] -= 2e-5
        below = loss().item()
    assert gradient == pytest.approx((above - below) / 2e-5, rel=1e-5)


def test_features_have_length_one_unless_asked_otherwise() -> None:
    model = randomize(tiny())
    images, tokens = batch()
    for encode, inputs in ((model.encode_image, images), (model.encode_text, tokens)):
        raw = encode(inputs, normalize=False)
        assert_close(encode(inputs), raw / raw.norm(dim=1, keepdim=True))
        assert (raw.norm(dim=1) - 1).abs().min() > 1e-3


def test_the_scale_stays_in_its_range() -> None:
    model = tiny()
    assert model(*batch()).logit_scale.item() == pytest.approx(1 / 0.07)
    for value, expected in ((5.0, math.log(100)), (-1.0, 0.0), (2.0, 2.0)):
        torch.nn.init.constant_(model.logit_scale, value)
        assert model(*batch()).logit_scale.item() == pytest.approx(math.exp(expected))
        model.limit_logit_scale()
        assert model.logit_scale.item() == pytest.approx(expected)
        model(*batch()).logit_scale.backward()  # also at the ends of its range, which it may leave inwards
        assert model.logit_scale.grad is not None
        assert model.logit_scale.grad.item() == pytest.approx(math.exp(expected))
        model.logit_scale.grad = None


def test_a_bias_only_where_there_is_one() -> None:
    assert tiny()(*batch()).logit_bias is None
    assert tiny(logit_bias=-10.0)(*batch()).logit_bias.item() == -10


def test_a_text_tower_alone() -> None:
    model = randomize(tiny())
    alone = TextTower(model.config.text).eval()
    alone.load_state_dict({k.removeprefix("text."): v for k, v in model.state_dict().items() if k.startswith("text.")})
    _, tokens = batch()
    assert torch.equal(model.text_proj(alone(tokens)), model.encode_text(tokens, normalize=False))


def test_weights_of_another_image_size() -> None:
    source, target = randomize(tiny()), tiny(vision={"image_size": (8, 24)})
    state = target.adapt_state_dict(source.state_dict(), source.config)
    target.load_state_dict(state)
    assert state["vision.position"].shape == (1 + 2 * 6, 32)
    assert torch.equal(state["text.position.weight"], source.text.position.weight)
    assert target.encode_image(torch.randn(2, 3, 8, 24)).isfinite().all()


def test_what_takes_no_weight_decay() -> None:
    model = tiny()
    assert model.no_weight_decay() == {"vision.position", "vision.prefix", "text.position.weight"}
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()}


def test_a_config_is_plain_data() -> None:
    config = tiny(logit_bias=-3.0, vision={"activation": "quick_gelu", "image_size": (8, 16)}).config
    assert build_config("clip", plain_config(config)) == config
    flat = structure(config)
    assert (flat["vision.activation"], flat["text.end_token"], flat["logit_bias"]) == ("quick_gelu", END, -3.0)
    assert "logit_scale" not in flat


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 0}, "embed_dim is 0, expected at least 1"),
        ({"logit_scale": 5.0}, r"logit_scale is 5\.0, expected 0 … ln 100 = 4\.6052"),
        ({"vision": {"num_classes": 3}}, r"vision\.num_classes is 3, expected 0"),
        ({"vision": {"distilled": True}}, r"vision\.distilled is True, expected false"),
        ({"text": {"end_token": 60}}, "end_token is 60, expected in 1 … vocab_size - 1 = 59"),
        ({"text": {"context_length": 1}}, "context_length is 1, expected at least 2"),
        ({"text": {"num_heads": 5}}, "embed_dim 24 is not a multiple of num_heads 5"),
    ],
    ids=str,
)
def test_configs_that_make_no_model(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_texts_that_are_none() -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"tokens have shape \[1, 10\], expected \[B, at most 9\]"):
        model.encode_text(torch.full((1, 10), END))
    with pytest.raises(ValueError, match=r"tokens have shape \[3\], expected \[B, at most 9\]"):
        model.encode_text(torch.full((3,), END))
    with pytest.raises(ValueError, match="tokens: row 1 has no end token 59"):
        model.encode_text(torch.tensor([[1, END], [1, 2], [END, 0]]))


def test_the_defaults_are_the_published_sizes() -> None:
    """ViT-B/32 has 151,277,313 parameters, as OpenAI's has."""
    with torch.device("meta"):
        model = CLIP(CLIPConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 151_277_313
    assert TextConfig() == CLIPConfig().text
