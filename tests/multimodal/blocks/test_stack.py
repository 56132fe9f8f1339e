"""The stack: selected tokens, inner layers, weights, checkpointing, and what its configuration refuses."""

import copy
from typing import Any

import pytest
import torch

from multimodal.attention.kernels import kernel_class, kernel_names
from multimodal.blocks import RotaryPosition, Stack, StackConfig
from multimodal.blocks.block import Selection
from tests.parity.keys import assert_close, gradients, randomize

LENGTH = 7


def stack(*, causal: bool = False, context_dim: int | None = None, **fields: Any) -> Stack:
    config = StackConfig(**{"embed_dim": 16, "depth": 2, "num_heads": 4, **fields})
    return randomize(Stack(config, causal=causal, context_dim=context_dim))


def test_permutation_equivariance() -> None:
    """Without positions the order of tokens and of context does not matter; rotary positions give it a meaning."""
    x, context = torch.randn(2, LENGTH, 16), torch.randn(2, 5, 12)
    order = torch.randperm(LENGTH)
    plain, rotary = stack(context_dim=12), stack(context_dim=12, rope="half")
    assert_close(plain(x[:, order], context.flip(1)).last, plain(x, context).last[:, order])
    assert not torch.allclose(rotary(x[:, order], context).last, rotary(x, context).last[:, order], atol=1e-3)


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_parts_are_chained(norm_order: str) -> None:
    """A stack is its blocks, then its norm; the layers asked for are what the blocks returned."""
    model, x = stack(depth=3, norm_order=norm_order), torch.randn(2, LENGTH, 16)
    expected = [x]
    for block in model.blocks:
        expected.append(block(expected[-1]).tokens)
    out = model(x, need_layers=[2, 0])
    assert len(out.layers) == 2
    assert out.layers[0].equal(expected[1])
    assert out.layers[1].equal(expected[3])
    assert out.last.equal(model.norm(expected[3]))
    assert stack(final_norm=False)(x, need_layers=[1]).layers[0].shape == x.shape


ONLY: dict[str, Selection] = {
    "first": slice(0, 1),
    "last two": slice(-2, None),
    "a token of each row": torch.tensor([[3], [6]]),
    "tokens of each row, in any order": torch.tensor([[5, 0, 2], [1, 1, 6]]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("selection", ONLY.values(), ids=ONLY)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_order": "post", "final_norm": False},
        {"layer_scale": 0.5, "rope": "half", "num_kv_heads": 2},
        {"rope": "interleaved", "qk_norm": True},
    ],
    ids=lambda fields: ", ".join(fields) or "plain",
)
def test_only_equals_selecting_from_the_full_result(fields: dict[str, Any], selection: Selection, causal: bool) -> None:
    """With a key mask, a mask, a bias, added positions and a padded context; gradients as well."""
    model = stack(causal=causal, context_dim=12, **fields)
    x, context = torch.randn(2, LENGTH, 16, requires_grad=True), torch.randn(2, 5, 12)
    inputs = {
        "pos": torch.randn(1, LENGTH, 16),
        "key_mask": torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2]]),
        "context_key_mask": torch.arange(5) < torch.tensor([[5], [3]]),
        "mask": torch.rand(1, 4, LENGTH, LENGTH) < 0.8,
        "bias": torch.randn(2, 1, LENGTH, LENGTH),
    }
    full = model(x, context, **inputs).last
    expected = full[:, selection] if isinstance(selection, slice) else full[torch.arange(2)[:, None], selection]
    actual = model(x, context, **inputs, only=selection).last
    assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad(out, x, gradient) for out in (actual, expected))
    assert_close(mine, theirs)


@pytest.mark.parametrize("kernel", kernel_names())
def test_only_with_every_kernel(kernel: str) -> None:
    """Also where the kernel cannot take fewer queries than keys, and where the last layer is asked for."""
    model, x = stack(attention=kernel), torch.randn(2, LENGTH, 16)
    expected = model(x).last[:, 1:3]
    computed: list[int] = []
    model.blocks[1].mlp.register_forward_hook(lambda _, args, __: computed.append(args[0].shape[1]))
    assert_close(model(x, only=slice(1, 3)).last, expected)
    assert computed == [2 if "cross" in kernel_class(kernel).supports else LENGTH]
    out = model(x, only=slice(1, 3), need_layers=[1])
    assert_close(out.last, expected)
    assert out.layers[0].shape[1] == LENGTH


def test_only_with_a_causal_kernel_that_takes_no_mask() -> None:
    """Selected rows of a causal pattern are a mask; a kernel without one computes all tokens."""
    model, x = stack(causal=True), torch.randn(2, LENGTH, 16)
    expected = model(x).last[:, -1:]
    model.blocks[1].self_attn.kernel.supports = frozenset({"causal", "cross"})
    assert_close(model(x, only=slice(-1, None)).last, expected)


def test_mask_that_all_queries_share() -> None:
    """[B, 1, 1, Nk] is a key mask by another name, selected tokens included."""
    model, x = stack(), torch.randn(2, LENGTH, 16)
    key_mask = torch.rand(2, LENGTH) < 0.7
    expected = model(x, key_mask=key_mask).last
    assert_close(model(x, mask=key_mask[:, None, None]).last, expected)
    assert_close(model(x, mask=key_mask[:, None, None], only=slice(0, 1)).last, expected[:, :1])


def test_positions_of_each_row() -> None:
    """A rope may have angles per row, [B, 1, N, K], and be selected from."""
    block, x = stack(rope="half").blocks[0], torch.randn(2, LENGTH, 16)
    rope = RotaryPosition(4)(LENGTH)
    cos, sin = (table.expand(2, 1, -1, -1) for table in rope.query)
    per_row = type(rope)((cos, sin), (cos, sin), "half")
    expected = block(x, rope=rope).tokens[:, 2:4]
    assert_close(block(x, rope=per_row, only=slice(2, 4)).tokens, expected)
    assert_close(block(x, rope=per_row, only=torch.tensor([[2, 3], [2, 3]])).tokens, expected)


def test_weights_of_asked_layers_only() -> None:
    """The other layers stay on their kernel, and the result is the same."""
    model = stack(depth=3, attention="sdpa", context_dim=12)
    x, context = torch.randn(2, LENGTH, 16), torch.randn(2, 5, 12)
    called: list[int] = []
    for i, block in enumerate(model.blocks):
        block.self_attn.kernel.register_forward_hook(lambda *_, i=i: called.append(i))
    out = model(x, context, need_weights={1})
    assert called == [0, 2]
    assert [w.shape for w in out.self_weights] == [(2, 4, LENGTH, LENGTH)]
    assert [w.shape for w in out.cross_weights] == [(2, 4, LENGTH, 5)]
    assert_close(out.last, model(x, context).last)


def test_activation_checkpointing() -> None:
    """The same output and gradients, with dropout and drop path drawn again as they were; the context's too."""
    plain = stack(context_dim=12, dropout=0.3, attention_dropout=0.2, mlp_dropout=0.1, drop_path=0.5).train()
    cheap = copy.deepcopy(plain)
    cheap.config = StackConfig(**{**vars(plain.config), "activation_checkpointing": True})
    x, context = torch.randn(2, LENGTH, 16), torch.randn(2, 5, 12)
    recomputed: list[int] = []
    cheap.blocks[0].mlp.register_forward_hook(lambda *_: recomputed.append(1))
    results = []
    for model in (plain, cheap):
        torch.manual_seed(1)
        given = context.clone().requires_grad_()
        out = model(x, given, need_layers=[0])
        (out.last.square().sum() + out.layers[0].sum()).backward()
        results.append((out.last, given.grad, *gradients(model).values()))
    assert len(recomputed) == 2
    for mine, theirs in zip(*results, strict=True):
        assert_close(mine, theirs)
    with torch.no_grad():
        cheap(x, context)
    assert len(recomputed) == 3


def test_drop_path_rates() -> None:
    """Rising linearly from 0 to the rate given, or one per layer; a list from YAML as well."""
    assert stack(depth=3, drop_path=0.2).config.drop_path_rates == pytest.approx((0, 0.1, 0.2))
    model = stack(drop_path=[0.1, 0.0])
    rates = [getattr(block.mlp_residual.drop_path, "rate", 0) for block in model.blocks]
    assert rates == [0.1, 0]


def test_state_dict_names() -> None:
    """Checkpoints depend on them; nothing but weights is stored."""
    model = stack(depth=1, context_dim=12, gated=True, qk_norm=True, layer_scale=0.1, rope="half")
    attention = ("q_proj", "k_proj", "v_proj", "out_proj")
    linears = [f"{a}.{p}" for a in ("self_attn", "cross_attn") for p in attention] + ["mlp.fc1", "mlp.gate", "mlp.fc2"]
    norms = [f"{a}.{n}" for a in ("self_attn", "cross_attn") for n in ("q_norm", "k_norm")]
    residuals = ("self_attn_residual", "cross_attn_residual", "mlp_residual")
    with_bias = [*linears, *norms, *(f"{r}.norm" for r in residuals)]
    expected = {f"blocks.0.{name}.{kind}" for name in with_bias for kind in ("weight", "bias")}
    expected |= {f"blocks.0.{r}.layer_scale.gamma" for r in residuals} | {"norm.weight", "norm.bias"}
    assert set(model.state_dict()) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": -1}, "depth is -1, expected at least 1"),
        ({"embed_dim": 0}, "embed_dim is 0, expected at least 1"),
        ({"num_heads": 0}, "num_heads is 0, expected at least 1"),
        ({"mlp_ratio": 0}, "mlp_ratio is 0, expected more than 0"),
        ({"embed_dim": 100, "num_heads": 12}, "embed_dim 100 is not a multiple of num_heads 12"),
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": 0}, "num_heads 4 is not a multiple of num_kv_heads 0"),
        ({"head_dim": -8}, "head_dim is -8, expected at least 1"),
        ({"dropout": 1}, r"dropout is 1, expected a rate in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"attention_dropout is -0.1, expected a rate in \[0, 1\)"),
        ({"drop_path": 1.0}, r"drop_path is 1.0, expected rates in \[0, 1\)"),
        ({"drop_path": (0.1, 0.1, 0.1)}, "drop_path is .*, expected one value or depth = 2 of them"),
        ({"attention": ("sdpa",)}, "attention is .*, expected one value or depth = 2 of them"),
    ],
    ids=str,
)
def test_refused_configurations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        StackConfig(**{"embed_dim": 16, "depth": 2, "num_heads": 4, **fields})


def test_refused_when_built() -> None:
    with pytest.raises(ValueError, match="even head_dim, found 5"):
        stack(head_dim=5, rope="half")
    with pytest.raises(ValueError, match="init is 'bert', expected one of vit, clip"):
        stack(init="bert")


def test_compiles_as_one_graph() -> None:
    model = stack(depth=1, causal=True, context_dim=12, rope="half", num_kv_heads=2)
    inputs = torch.randn(2, LENGTH, 16), torch.randn(2, 5, 12)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(*inputs).last, model(*inputs).last)
