"""The Decision Transformer beside Hugging Face's, and beside the original authors': the same without its positions."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DecisionTransformerConfig as TheirConfig
from transformers import DecisionTransformerModel

from multimodal import pretrained
from multimodal.models.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from multimodal.pretrained import Checkpoint
from multimodal.pretrained.published_dt import to_hf, to_original
from tests.parity.keys import assert_close, randomize

TINY: dict[str, Any] = {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 3, "max_ep_len": 50}
OURS: dict[str, Any] = {"state_shape": (5,), "action_dim": 3, "embed_dim": 32, "max_episode_length": 50}
STEPS = 6


def published(**options: Any) -> DecisionTransformerModel:
    """A random model of transformers, with no parameter at its initial value."""
    fixed = {"n_positions": 64, "vocab_size": 1, "bos_token_id": 0, "eos_token_id": 0}
    return randomize(DecisionTransformerModel(TheirConfig(**TINY, **fixed, **options)))


def original() -> tuple[DecisionTransformerModel, dict[str, Tensor]]:
    """A model whose position table is zero, which is the original authors'; and its weights under their names."""
    model = published()
    with torch.no_grad():
        model.encoder.wpe.weight.zero_()
    state = {key.replace("encoder.", "transformer."): value for key, value in model.state_dict().items()}
    del state["transformer.wpe.weight"]
    for layer in range(TINY["n_layer"]):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 1024, 1024, dtype=torch.uint8).tril()
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return model, state


def batch() -> dict[str, Tensor]:
    """Windows from the middle of episodes."""
    return {
        "states": torch.randn(4, STEPS, 5),
        "actions": torch.rand(4, STEPS, 3) * 2 - 1,
        "timesteps": torch.arange(STEPS) + torch.tensor([0, 3, 9, 44])[:, None],
        "returns": torch.rand(4, STEPS) * 3,
    }


def theirs(model: DecisionTransformerModel, inputs: dict[str, Tensor], valid: Tensor | None = None) -> Any:
    return model(
        states=inputs["states"],
        actions=inputs["actions"],
        returns_to_go=inputs["returns"][..., None],
        timesteps=inputs["timesteps"],
        attention_mask=valid if valid is None else valid.long(),
    )


@torch.no_grad()
def assert_alike(ours: DecisionTransformer, model: DecisionTransformerModel) -> None:
    """All three heads, whole windows and windows padded on the left, as theirs are."""
    inputs, valid = batch(), torch.ones(4, STEPS, dtype=torch.bool)
    valid[1, :2] = valid[2, :5] = False
    for mask in (None, valid):
        found = ours(**inputs, valid=mask, auxiliary=True)
        expected = theirs(model, inputs, mask)
        kept = valid if mask is not None else torch.ones_like(valid)
        assert_close(found.actions[kept], expected.action_preds[kept])
        assert_close(found.states[kept], expected.state_preds[kept])
        assert_close(found.returns[kept], expected.return_preds[..., 0][kept])
        assert_close(ours(**inputs, valid=mask)[kept], expected.action_preds[kept])  # the last block in part alone


@pytest.mark.parametrize(
    "options",
    [{}, {"n_head": 4, "n_inner": 48, "activation_function": "gelu_new"}, {"action_tanh": False}],
    ids=["published", "heads", "no tanh"],
)
def test_hugging_face(options: dict[str, Any], tmp_path: Path) -> None:
    model = published(**options)
    assert_alike(pretrained.load(model, task="dt").model, model)
    model.save_pretrained(tmp_path / "theirs")
    loaded = pretrained.load(tmp_path / "theirs")
    assert loaded.config["token_bias"]
    assert loaded.config["context_length"] == 20
    assert_alike(loaded.model, model)

    to_hf(pretrained.read(tmp_path / "theirs"), tmp_path / "ours")
    back, report = DecisionTransformerModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_alike(loaded.model, back.eval())
    own, written = model.state_dict(), back.state_dict()
    unused = ("encoder.wte.weight", "encoder.wpe.weight")
    assert all(torch.equal(written[key], own[key]) for key in own if key not in unused)
    assert torch.equal(written["encoder.wpe.weight"][0], own["encoder.wpe.weight"][0])


def test_the_original_authors_state_dict(tmp_path: Path) -> None:
    model, state = original()
    torch.save(state, tmp_path / "hopper.pt")
    with pytest.warns(UserWarning, match="does not say how many attention heads"):
        loaded = pretrained.load(tmp_path / "hopper.pt", task="dt")
    assert not loaded.config["token_bias"]
    assert_alike(loaded.model, model)

    to_original(Checkpoint.of("dt", loaded.model), tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state if key != "transformer.wte.weight")


def test_what_was_trained_here_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Without the heads that the paper does not train either, and with what belongs to the states."""
    ours = randomize(DecisionTransformer(DecisionTransformerConfig(**OURS)))
    checkpoint = Checkpoint.of("dt", ours, preprocess={"environment": "Hopper-v5"})
    to_hf(checkpoint, tmp_path / "hf")
    to_original(checkpoint, tmp_path / "original.pt")
    inputs = batch()
    back = DecisionTransformerModel.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ours(**inputs)
        assert_close(theirs(back, inputs).action_preds, expected)
        assert_close(pretrained.load(tmp_path / "original.pt").model(**inputs), expected)
    assert pretrained.read(tmp_path / "hf").preprocess == {"environment": "Hopper-v5"}


def test_discrete_actions_are_vectors_there(tmp_path: Path) -> None:
    ours = randomize(DecisionTransformer(DecisionTransformerConfig(**OURS, discrete=True)))
    to_hf(Checkpoint.of("dt", ours), tmp_path / "hf")
    back = DecisionTransformerModel.from_pretrained(tmp_path / "hf").eval()
    inputs = batch() | {"actions": torch.randint(3, (4, STEPS))}
    one_hot = inputs | {"actions": torch.nn.functional.one_hot(inputs["actions"], 3).float()}
    with torch.no_grad():
        assert_close(theirs(back, one_hot).action_preds, ours(**inputs))
        assert_close(pretrained.load(tmp_path / "hf").model(**inputs), ours(**inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"returns": False}, "cannot express returns False"),
        ({"state_shape": (1, 36, 36)}, r"cannot express state_shape \(1, 36, 36\)"),
        ({"norm_order": "post"}, "cannot express norm_order 'post'"),
        ({"attention": "local", "attention_options": {"window": 4}, "attention_dropout": 0.0}, "attention 'local'"),
    ],
)
def test_what_theirs_cannot_be(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = DecisionTransformer(DecisionTransformerConfig(**(OURS | options)))
    with pytest.raises(ValueError, match=message):
        to_hf(Checkpoint.of("dt", model), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("options", [{"num_heads": 4}, {"context_length": 30}, {"token_bias": True}])
def test_what_the_original_file_could_not_tell(options: dict[str, Any], tmp_path: Path) -> None:
    model = DecisionTransformer(DecisionTransformerConfig(**(OURS | options)))
    with pytest.raises(ValueError, match=f"cannot express {next(iter(options))}"):
        to_original(Checkpoint.of("dt", model), tmp_path / "out.pt")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    published().save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True, expected False"),
        ({"n_head": 3}, "embed_dim 32 is not a multiple of num_heads 3"),
        ({"hidden_size": 0}, "its config.json describes no model"),
        ({"n_layer": 2}, "unknown encoder.h.2"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            pretrained.read(tmp_path / "hf")
    torch.save({"embed_timestep.weight": torch.zeros(3)}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="no weights of a Decision Transformer"):
        pretrained.read(tmp_path / "bad.pt")
