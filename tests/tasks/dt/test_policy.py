"""The stepping API: equal to the whole model, and to Hugging Face's, at every step; and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import DecisionTransformerConfig as TheirConfig
from transformers import DecisionTransformerModel

from multimodal import pretrained
from multimodal.models.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from multimodal.pretrained import Checkpoint
from tasks.dt.policy import Policy
from tasks.dt.preprocess import TrajectoryPreprocess
from tests.parity.keys import randomize

TINY: dict[str, Any] = {
    "state_shape": (3,),
    "action_dim": 2,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
    "context_length": 4,
    "max_episode_length": 12,
}
SCALES: dict[str, Any] = {
    "state_mean": (1.0, 2.0, 3.0),
    "state_std": (1.0, 0.5, 2.0),
    "action_low": (-2.0, 0.0),
    "action_high": (2.0, 10.0),
    "return_scale": 10.0,
    "return_range": (0.0, 20.0),
    "max_episode_length": 12,
}


def policy_of(scales: dict[str, Any] | None = None, **options: Any) -> Policy:
    config = DecisionTransformerConfig(**(TINY | options))
    given = SCALES | (scales or {}) | ({"action_low": None, "action_high": None} if config.discrete else {})
    return Policy(randomize(DecisionTransformer(config)), TrajectoryPreprocess(**given))


@torch.no_grad()
def expected_action(policy: Policy, seen: np.ndarray, done: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The action by the whole model on the last steps: observations [B, T, S], actions [B, T - 1, …], returns [B, T]"""
    config, scales = policy.model.config, policy.preprocess
    first = max(seen.shape[1] - config.context_length, 0)
    timesteps = torch.arange(first, seen.shape[1]).expand(len(seen), -1)
    states = torch.from_numpy(scales.states(seen[:, first:]))
    actions = torch.from_numpy(done[:, first:] if config.discrete else scales.to_model(done[:, first:]))
    returns = torch.from_numpy((asked[:, first:] / scales.return_scale).astype(np.float32))
    found = policy.model(states, actions, timesteps, returns if config.returns else None)[:, -1]
    return found.argmax(dim=1).numpy() if config.discrete else scales.to_environment(found.numpy())


@pytest.mark.parametrize(
    ("scales", "options"),
    [
        ({}, {}),
        ({}, {"discrete": True}),
        ({}, {"returns": False}),
        ({"delayed": True}, {}),
        ({}, {"rope": "half", "num_kv_heads": 1}),
        ({}, {"num_kv_heads": 1}),
        ({}, {"attention": "local", "attention_options": {"window": 4}, "attention_dropout": 0.0}),
    ],
    ids=["vectors", "discrete", "cloning", "delayed", "rotary", "grouped heads", "without a cache"],
)
def test_every_action_is_that_of_the_whole_model(scales: dict[str, Any], options: dict[str, Any]) -> None:
    """Three environments, ten steps, of which the window holds four; one environment ends on the way."""
    policy = policy_of(scales, **options)
    random = np.random.default_rng(0)
    seen, rewards = random.normal(size=(3, 10, 3)), random.uniform(0, 3, (3, 10))
    targets = np.array([5.0, 12.0, 18.0])
    spent = np.zeros_like(rewards) if scales.get("delayed") else np.cumsum(rewards, axis=1) - rewards
    asked = targets[:, None] - spent
    done: list[np.ndarray] = []
    rows = np.arange(3)
    for again in range(2):  # a reset leaves nothing behind
        policy.reset(targets if policy.model.config.returns else None)
        done, rows = [], np.arange(3)
        for step in range(10):
            if step == 6:
                policy.keep([2, 0])
                rows, done = np.array([2, 0]), [actions[[2, 0]] for actions in done]
            action = policy.act(seen[rows, step], rewards[rows, step - 1] if step else None)
            shape = (len(rows), 0) if policy.model.config.discrete else (len(rows), 0, 2)
            past = np.stack(done, axis=1) if done else np.zeros(shape, dtype=action.dtype)
            expected = expected_action(policy, seen[rows, : step + 1], past, asked[rows, : step + 1])
            np.testing.assert_allclose(action, expected, atol=2e-5, err_msg=f"step {step}, round {again}")
            done.append(action)


def test_one_environment_is_a_batch_of_one() -> None:
    policy = policy_of()
    seen = np.random.default_rng(0).normal(size=(7, 3))
    policy.reset(15.0)
    alone = [policy.act(row, 1.0 if step else None) for step, row in enumerate(seen)]
    policy.reset([15.0])
    batched = [policy.act(row[None], [1.0] if step else None) for step, row in enumerate(seen)]
    assert alone[0].shape == (2,)
    np.testing.assert_array_equal(np.stack(alone), np.concatenate(batched))
    discrete = policy_of(discrete=True)
    discrete.reset(15.0)
    assert discrete.act(seen[0]).shape == ()
    assert int(discrete.act(seen[1], 1.0)) in (0, 1)


def test_a_compiled_policy_acts_the_same() -> None:
    plain = policy_of()
    compiled = Policy(plain.model, plain.preprocess)
    compiled.compile()
    seen = np.random.default_rng(0).normal(size=(7, 2, 3))  # the window holds four
    for _ in range(2):
        for policy in (plain, compiled):
            policy.reset([5.0, 12.0])
        for step, row in enumerate(seen):
            rewards = np.full(2, 0.5) if step else None
            expected, found = plain.act(row, rewards), compiled.act(row, rewards)
            np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=f"step {step}")


@torch.no_grad()
def test_actions_are_those_of_hugging_face_run_anew_at_each_step() -> None:
    fixed = {"vocab_size": 1, "bos_token_id": 0, "eos_token_id": 0, "n_positions": 64}
    theirs = randomize(
        DecisionTransformerModel(
            TheirConfig(state_dim=3, act_dim=2, hidden_size=16, n_layer=3, n_head=2, max_ep_len=30, **fixed)
        )
    )
    preprocess = TrajectoryPreprocess(**(SCALES | {"action_low": None, "action_high": None, "max_episode_length": 30}))
    policy = Policy(pretrained.load(theirs).model, preprocess)
    window = policy.model.config.context_length
    random = np.random.default_rng(0)
    states, actions, asked = [], [], [15.0]
    policy.reset(asked[0])
    for step in range(window + 5):
        observation = random.normal(size=3)
        states.append(torch.from_numpy(preprocess.states(observation)))
        action = policy.act(observation, 0.5 if step else None)
        asked.append(asked[-1] - 0.5)
        length = min(step + 1, window)
        expected = theirs(
            states=torch.stack(states[-window:])[None],
            actions=torch.stack([*actions, torch.zeros(2)][-window:])[None],
            returns_to_go=torch.tensor(asked[:-1][-window:])[None, :, None] / 10,
            timesteps=torch.arange(step + 1)[None, -window:],
            attention_mask=torch.ones(1, length, dtype=torch.long),
        ).action_preds[0, -1]
        np.testing.assert_allclose(action, expected.numpy(), atol=1e-5)
        actions.append(torch.from_numpy(action))


def test_what_a_policy_refuses() -> None:
    policy, seen = policy_of(), np.zeros(3)
    for target, message in ((None, "no target is given, expected a return"), (float("nan"), "expected finite numbers")):
        with pytest.raises(ValueError, match=message):
            policy.reset(target)
    with pytest.raises(ValueError, match="a target is given, expected none"):
        policy_of(returns=False).reset(3.0)
    policy.reset([1.0, 2.0])
    with pytest.raises(ValueError, match=r"target_return has shape \(2,\), expected one for each of 3 environments"):
        policy.act(np.zeros((3, 3)))
    policy.reset(5.0)
    with pytest.raises(ValueError, match=r"observation of shape \(4,\), expected \(3,\)"):
        policy.act(np.zeros(4))
    with pytest.raises(ValueError, match="reward is given at step 0, expected none"):
        policy.act(seen, 1.0)
    policy.act(seen)
    with pytest.raises(ValueError, match="reward is missing at step 1"):
        policy.act(seen)
    with pytest.raises(ValueError, match=r"reward has shape \(2,\), expected \(1,\)"):
        policy.act(seen, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"observation of shape \(2, 3\), expected 1 as before"):
        policy.act(np.zeros((2, 3)), 1.0)
    with pytest.raises(ValueError, match="reward is nan at step 1, expected finite numbers"):
        policy.act(seen, float("nan"))
    with pytest.raises(ValueError, match="observation at step 1 is not finite"):
        policy.act(np.full(3, np.inf), 1.0)
    with pytest.raises(ValueError, match="positions are bool, expected whole numbers"):
        policy.keep([True])


def test_time_past_the_longest_episode_is_not_made_up() -> None:
    policy = policy_of()
    policy.reset(5.0)
    for step in range(12):
        policy.act(np.zeros(3), 1.0 if step else None)
    with pytest.raises(ValueError, match="step 12: the model has timesteps for episodes of up to 12 steps"):
        policy.act(np.zeros(3), 1.0)


def test_a_policy_comes_from_a_checkpoint_that_says_how_to_scale(tmp_path: Any) -> None:
    policy = policy_of()
    preprocess = policy.preprocess.to_dict()
    pretrained.save(tmp_path / "m.safetensors", Checkpoint.of("dt", policy.model, preprocess=preprocess))
    loaded = Policy.load(tmp_path / "m.safetensors")
    assert loaded.preprocess == policy.preprocess
    loaded.reset(5.0), policy.reset(5.0)
    np.testing.assert_array_equal(loaded.act(np.ones(3)), policy.act(np.ones(3)))
    for found, message in (
        (None, "lacks how its states and returns were scaled"),
        ({"mean": 1}, "its preprocessing has 'mean', expected state_mean"),
        ({"state_mean": None}, "its preprocessing lacks state_std"),
        (preprocess | {"state_std": [1.0, 0.0, 1.0]}, "cannot be used .state_std is .* expected numbers above 0"),
        (preprocess | {"state_std": ["a"]}, "cannot be used"),
    ):
        pretrained.save(tmp_path / "m.safetensors", Checkpoint.of("dt", policy.model, preprocess=found))
        with pytest.raises(ValueError, match=message):
            Policy.load(tmp_path / "m.safetensors")
