"""HF GPT-2 (tanh GELU) and the GPT-2 inside HF Decision Transformer (ReLU): full, cached, padded."""

import torch
from transformers import DecisionTransformerConfig, DecisionTransformerModel, GPT2Config, GPT2Model

from multimodal.blocks import Stack, StackConfig
from tests.parity.keys import (
    assert_close,
    assert_same_gradients,
    assert_same_initialisation,
    backward_alike,
    final_norm,
    gradients,
    qkv,
    randomize,
    to_blocks,
)

TABLE = {
    "ln_1": "self_attn_residual.norm",
    "attn.c_attn": qkv("self_attn"),
    "attn.c_proj": "self_attn.out_proj",
    "ln_2": "mlp_residual.norm",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
CONFIG = StackConfig(embed_dim=32, depth=3, num_heads=4, activation="gelu_tanh")


def published_gpt2() -> GPT2Model:
    config = GPT2Config(
        vocab_size=11, n_positions=16, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0, embd_pdrop=0
    )
    return randomize(GPT2Model(config))


def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return to_blocks(state, "h", TABLE, transposed=True) | final_norm(state, "ln_f")


def test_gpt2() -> None:
    theirs = published_gpt2()
    ours = Stack(CONFIG, causal=True).eval()
    ours.load_state_dict(convert(theirs.state_dict()))
    x = torch.randn(2, 9, 32)
    positions = theirs.wpe.weight[:9].detach()

    actual, expected = ours(x + positions).last, theirs(inputs_embeds=x).last_hidden_state
    assert_close(actual, expected)
    backward_alike(actual, expected)
    assert_same_gradients(ours, convert(gradients(theirs)))


@torch.no_grad()
def test_gpt2_cached() -> None:
    """A prefill, two steps of one token and a chunk of four."""
    theirs = published_gpt2()
    ours = Stack(CONFIG, causal=True).eval()
    ours.load_state_dict(convert(theirs.state_dict()))
    x = torch.randn(2, 9, 32)
    cache, published_cache = ours.make_cache(16), None
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 9)):
        out = theirs(inputs_embeds=x[:, start:end], use_cache=True, cache=published_cache)
        published_cache = out.cache
        assert_close(ours(x[:, start:end] + theirs.wpe.weight[start:end], cache=cache).last, out.last_hidden_state)


def test_decision_transformer() -> None:
    """Left padding; HF adds the first row of its position table, wpe[0], to every token."""
    config = DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=32, n_layer=3, n_head=4, n_positions=16, vocab_size=1, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    theirs = randomize(DecisionTransformerModel(config))
    ours = Stack(StackConfig(embed_dim=32, depth=3, num_heads=4, activation="relu"), causal=True).eval()
    ours.load_state_dict(convert(theirs.encoder.state_dict()))
    steps = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    inputs = []
    theirs.encoder.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(kwargs), with_kwargs=True)
    expected = theirs(
        states=torch.randn(2, 4, 3),
        actions=torch.randn(2, 4, 2),
        rewards=torch.randn(2, 4, 1),
        returns_to_go=torch.randn(2, 4, 1),
        timesteps=torch.arange(4).expand(2, 4),
        attention_mask=steps,
    ).last_hidden_state

    key_mask = inputs[0]["attention_mask"].bool()
    assert key_mask.shape == (2, 12)  # return, state and action of each step
    actual = ours(inputs[0]["inputs_embeds"].detach() + theirs.encoder.wpe.weight[0].detach(), key_mask=key_mask).last
    assert_close(actual[key_mask], expected[key_mask])
    backward_alike(actual[key_mask], expected[key_mask])
    assert_same_gradients(ours, convert(gradients(theirs.encoder)))


def test_initialisation() -> None:
    config = GPT2Config(vocab_size=8, n_positions=4, n_embd=128, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    ours = Stack(StackConfig(embed_dim=128, depth=3, num_heads=4, init="gpt2"))
    assert_same_initialisation(ours, convert(GPT2Model(config).state_dict()))
