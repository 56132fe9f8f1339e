"""The parts of a block: residual branches, MLP, token selection, patches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.attention import Attention, BlockCache
from multimodal.blocks import Block, Mlp, PatchEmbed, Residual, select_tokens
from multimodal.blocks.mlp import Activation, build_activation
from multimodal.blocks.residual import DropPath, build_norm
from tests.parity.keys import assert_close, randomize


def test_residual_orders() -> None:
    x, branch = torch.randn(2, 5, 8), nn.Linear(8, 8)
    pre = randomize(Residual(8, order="pre", layer_scale=0.5))
    post = randomize(Residual(8, order="post", norm="rms"))
    assert_close(pre.leave(x, branch(pre.enter(x))), x + pre.layer_scale.gamma * branch(pre.norm(x)))
    assert_close(post.leave(x, branch(post.enter(x))), post.norm(x + branch(x)))
    assert isinstance(post.norm, nn.RMSNorm)


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    x, drop = torch.randn(4000, 3, 4), DropPath(0.25)
    out = drop(x)
    dropped = (out == 0).all((1, 2))
    assert abs(dropped.float().mean() - 0.25) < 0.02
    assert_close(out[~dropped], x[~dropped] / 0.75)
    assert abs(drop(torch.ones(4000, 1, 1)).mean() - 1) < 0.02
    assert drop.eval()(x) is x


def test_drop_path_is_on_the_branch() -> None:
    """A dropped sample passes unchanged."""
    residual, x = Residual(4, drop_path=0.5), torch.randn(50, 3, 4)
    out = residual.leave(x, torch.ones_like(x))
    unchanged = (out == x).all((1, 2))
    assert 5 < unchanged.sum() < 45
    assert_close(out[~unchanged], x[~unchanged] + 2)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        ("silu", lambda x: x * torch.sigmoid(x)),
    ],
)
def test_activations(name: Activation, formula: object) -> None:
    x = torch.linspace(-6, 6, 101)
    assert_close(build_activation(name)(x), formula(x))
    mlp = Mlp(8, 12, activation=name, gated=True)
    tokens = torch.randn(2, 3, 8)
    assert_close(mlp(tokens), mlp.fc2(formula(mlp.gate(tokens)) * mlp.fc1(tokens)))


def test_mlp_dropout_is_on_the_hidden_activations() -> None:
    mlp = Mlp(4, 1000, activation="relu", dropout=0.5)
    for linear in (mlp.fc1, mlp.fc2):
        nn.init.constant_(linear.weight, 1 / linear.in_features)
        nn.init.zeros_(linear.bias)
    out = mlp(torch.ones(1, 1, 4))
    assert 0.8 < out[0, 0, 0] < 1.2
    assert out[0, 0, 0] != 1
    assert_close(mlp.eval()(torch.ones(1, 1, 4)), torch.ones(1, 1, 4))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="activation is 'gleu', expected relu, gelu"):
        build_activation("gleu")
    with pytest.raises(ValueError, match="norm is 'batch', expected layer or rms"):
        build_norm("batch", 4, 1e-5)


def test_select_tokens() -> None:
    x = torch.randn(2, 3, 5, 7)
    index = torch.tensor([[4, 0], [1, 1]])
    assert select_tokens(x, None) is x
    assert select_tokens(x, slice(1, None)).equal(x[:, 1:])
    assert select_tokens(x, index, dim=2).equal(torch.stack([x[0][:, [4, 0]], x[1][:, [1, 1]]]))
    one_for_all = select_tokens(x[:1], index, dim=2)  # a mask or position shared by the batch
    assert one_for_all.equal(torch.stack([x[0][:, [4, 0]], x[0][:, [1, 1]]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patch_embed_is_a_strided_convolution(dtype: torch.dtype) -> None:
    embed = PatchEmbed((2, 3), 5, 8).to(dtype)
    images = torch.randn(2, 5, 6, 12, dtype=dtype)
    weight = embed.proj.weight.unflatten(1, (5, 2, 3))
    expected = F.conv2d(images, weight, embed.proj.bias, stride=(2, 3)).flatten(2).transpose(1, 2)
    assert (embed(images) - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)
    with pytest.raises(ValueError, match="image size 6 x 11 is not a multiple of the patch size 2 x 3"):
        embed(images[..., :11])


def cross_block(cross: bool) -> Block:
    cross_attn = Attention(8, 2) if cross else None
    return Block(Attention(8, 2), Mlp(8, 16), [Residual(8) for _ in range(3 if cross else 2)], cross_attn=cross_attn)


def test_block_and_context_go_together() -> None:
    x = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="needs a context"):
        cross_block(cross=True)(x)
    with pytest.raises(ValueError, match="needs a context"):
        cross_block(cross=True)(x, cache=BlockCache(4, cross_attn=True))
    with pytest.raises(ValueError, match="a context is given to a block without cross-attention"):
        cross_block(cross=False)(x, x)
    with pytest.raises(ValueError, match="selected tokens only without a cache"):
        cross_block(cross=False)(x, cache=BlockCache(4), only=slice(0, 1))


@pytest.mark.parametrize("moved", ["query and key", "context key"])
def test_added_positions_leave_values_alone(moved: str) -> None:
    """`pos` and `context_pos` steer where attention looks; with a single key there is nothing to steer."""
    block, x, context = cross_block(cross=True), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    pos: dict[str, Tensor] = {"pos" if moved == "query and key" else "context_pos": torch.randn(1, 1, 8)}
    assert_close(block(x, context, **pos).tokens, block(x, context).tokens)
    many = torch.randn(2, 4, 8)
    many_pos = {key: torch.randn(1, 4, 8) for key in pos}
    assert not torch.allclose(block(many, many, **many_pos).tokens, block(many, many).tokens)
