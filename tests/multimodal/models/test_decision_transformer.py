"""The Decision Transformer: the order of its tokens, padding, caches, and what its parts may be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.models.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from multimodal.pretrained import build_config, plain_config
from tests.parity.keys import assert_close, randomize

TINY: dict[str, Any] = {
    "state_shape": (5,),
    "action_dim": 3,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "max_episode_length": 40,
}
STEPS = 6


def build(**options: Any) -> DecisionTransformer:
    return randomize(DecisionTransformer(DecisionTransformerConfig(**(TINY | options))))


def inputs(model: DecisionTransformer, batch: int = 3, steps: int = STEPS) -> dict[str, Tensor]:
    config = model.config
    discrete = torch.randint(config.action_dim, (batch, steps))
    found = {
        "states": torch.randn(batch, steps, *config.state_shape),
        "actions": discrete if config.discrete else torch.rand(batch, steps, config.action_dim) * 2 - 1,
        "timesteps": torch.arange(steps) + torch.arange(batch)[:, None],
    }
    return found | {"returns": torch.rand(batch, steps)} if config.returns else found


KINDS = pytest.mark.parametrize(
    "options",
    [{}, {"discrete": True}, {"returns": False}, {"token_bias": True, "auxiliary": True}],
    ids=["vectors", "discrete", "cloning", "auxiliary"],
)


def test_tokens_are_return_state_action_of_each_step_in_turn() -> None:
    """Each token of the sequence depends on one of the three inputs, at one step."""
    model, given = build(), inputs(build())
    before = model.embed(**given)
    for place, name in enumerate(("returns", "states", "actions")):
        for step in range(STEPS):
            changed = {key: value.clone() for key, value in given.items()}
            changed[name][:, step] += 1
            differs = (model.embed(**changed) != before).any(dim=2).any(dim=0)
            assert differs.nonzero().flatten().tolist() == [3 * step + place]


@torch.no_grad()
def test_an_action_depends_on_what_came_before_it_alone() -> None:
    model, given = build(), inputs(build())
    before = model(**given)
    for name, first in (("returns", 2), ("states", 2), ("actions", 3)):  # of step 2
        changed = {key: value.clone() for key, value in given.items()}
        changed[name][:, 2] += 1
        differs = (model(**changed) != before).any(dim=2).any(dim=0)
        assert differs.tolist() == [step >= first for step in range(STEPS)]


@KINDS
@torch.no_grad()
def test_padding_changes_nothing(options: dict[str, Any]) -> None:
    """One real step in a window of twenty, behind padding or before it, whatever the padding holds."""
    model = build(**options)
    one = inputs(model, batch=1, steps=1)
    expected = model(**one)
    rest = inputs(model, batch=1, steps=19)
    for behind in (True, False):
        window = {name: torch.cat([value, rest[name]][:: 1 if behind else -1], dim=1) for name, value in one.items()}
        at = 0 if behind else 19
        valid = torch.arange(20)[None] == at
        found = model(**window, valid=valid)
        assert found.isfinite().all()
        assert_close(found[:, [at]], expected)
        if behind:
            assert_close(model(**window)[:, [0]], expected)  # a causal model needs no mask for it


@KINDS
@torch.no_grad()
def test_the_last_action_may_be_missing(options: dict[str, Any]) -> None:
    model = build(**options)
    given = inputs(model)
    without = given | {"actions": given["actions"][:, :-1]}
    assert_close(model(**without), model(**given))
    tokens = model.embed(**without)
    assert tokens.shape[1] == STEPS * model.config.tokens_per_step - 1
    assert_close(model.next_action(tokens), model(**given)[:, -1])


@KINDS
@torch.no_grad()
def test_a_cache_gives_the_actions_of_the_whole_model(options: dict[str, Any]) -> None:
    model = build(**options)
    given, count = inputs(model), model.config.tokens_per_step
    tokens, expected = model.embed(**given), model(**given)
    cache = model.encoder.make_cache(tokens.shape[1])
    for step in range(STEPS):
        start = max(count * step - 1, 0)
        assert_close(model.next_action(tokens[:, start : count * (step + 1) - 1], cache), expected[:, step])


@torch.no_grad()
def test_heads() -> None:
    model = build(auxiliary=True)
    given = inputs(model)
    found = model(**given, auxiliary=True)
    assert_close(found.actions, model(**given))
    assert (found.states.shape, found.returns.shape) == ((3, STEPS, 5), (3, STEPS))
    assert found.actions.abs().max() < 1
    wide = build(action_tanh=False)
    wide.predict_action.bias.fill_(5)
    assert wide(**inputs(wide)).max() > 1
    assert build(auxiliary=True, returns=False).predict_return is None
    assert all(head is None for head in (build().predict_state, build().predict_return))


@torch.no_grad()
def test_states_may_be_images() -> None:
    model = build(state_shape=(2, 84, 40), discrete=True, auxiliary=True)
    given = inputs(model, batch=2)
    assert model(**given).shape == (2, STEPS, 3)
    assert model.embed_state.convolutions(torch.zeros(1, 2, 84, 84)).shape == (1, 64, 7, 7)  # as on Atari
    assert model.predict_state is None
    with pytest.raises(ValueError, match="an image of 35 x 84 pixels, expected at least 36 x 36"):
        build(state_shape=(2, 35, 84))


def test_everything_is_trained() -> None:
    for options in ({}, {"discrete": True}, {"returns": False}, {"state_shape": (1, 36, 36)}, {"token_bias": True}):
        model = build(**options).train()
        model(**inputs(model)).square().sum().backward()
        assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_returns_have_to_be_as_the_config_says() -> None:
    model = build()
    given = inputs(model)
    with pytest.raises(ValueError, match="returns are missing"):
        model(given["states"], given["actions"], given["timesteps"])
    cloning = build(returns=False)
    with pytest.raises(ValueError, match="returns are given"):
        cloning(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_shape": (3, 4)}, r"state_shape is \(3, 4\), expected one size, or channels, height and width"),
        ({"action_dim": 1, "discrete": True}, "action_dim is 1, expected at least 1, or 2 if discrete"),
        ({"context_length": 0}, "context_length is 0, expected at least 1"),
        ({"max_episode_length": 0}, "max_episode_length is 0, expected at least 1"),
        ({"embed_dropout": 1.0}, r"embed_dropout is 1.0, expected a rate in \[0, 1\)"),
    ],
)
def test_configs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecisionTransformerConfig(**(TINY | options))


def test_a_config_survives_as_plain_data() -> None:
    config = DecisionTransformerConfig(**(TINY | {"state_shape": (1, 36, 36)}))
    assert build_config("dt", plain_config(config)) == config
