"""ViT around its stack: tokens, pooling, sizes, features on request. tests/parity/ compares whole models with timm."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from multimodal.models.vit import SIZES, ViT, ViTConfig
from tests.parity.keys import assert_close, randomize

TINY: dict[str, Any] = {
    "image_size": (8, 12), "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3
}  # fmt: skip


def vit(**fields: Any) -> ViT:
    return randomize(ViT(ViTConfig(**{**TINY, **fields})))


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 8, 12)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_registers": 2},
        {"distilled": True},
        {"pool_norm": True},
        {"norm_order": "post", "layer_scale": 0.5},
        {"attention": "local", "attention_options": {"window": 2}},
    ],
    ids=lambda fields: ", ".join(fields) or "plain",
)
def test_class_shortcut_equals_full_computation(fields: dict[str, Any]) -> None:
    """The last block computes the tokens that the head reads alone; the result, and its gradient, are the same."""
    model, x = vit(**fields), images().requires_grad_()
    tokens = model.pool_norm(model.encoder(model.embed(x)).last)
    expected = model.head(tokens[:, 0])
    if model.distilled_head is not None:
        expected = (expected + model.distilled_head(tokens[:, 1])) / 2
    computed: list[int] = []
    model.encoder.blocks[-1].mlp.register_forward_hook(lambda *args: computed.append(args[2].shape[1]))
    actual = model(x)
    assert_close(actual, expected)
    assert computed == [7 if model.config.attention == "local" else 1 + model.config.distilled]
    gradient = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad(out, x, gradient) for out in (actual, expected))
    assert_close(mine, theirs)


@pytest.mark.parametrize("pool_norm", [False, True])
@pytest.mark.parametrize("prefix", [{}, {"class_token": False}, {"num_registers": 2}], ids=str)
def test_mean_pooling(prefix: dict[str, Any], pool_norm: bool) -> None:
    """The mean is over the six patches, prefix tokens left out; one norm, before or after it."""
    model = vit(pool="mean", pool_norm=pool_norm, **prefix)
    x = images()
    tokens = model.encoder(model.embed(x)).last
    assert tokens.shape[1] == model.config.num_prefix + 6
    assert_close(model(x), model.head(model.pool_norm(tokens[:, -6:].mean(1))))
    norms = [name for name, _ in model.named_parameters() if name in ("encoder.norm.weight", "pool_norm.weight")]
    assert norms == ["pool_norm.weight" if pool_norm else "encoder.norm.weight"]


def test_distilled_heads() -> None:
    """Both heads' logits in training, their mean at inference."""
    model, x = vit(distilled=True), images()
    both = model.train()(x)
    assert both.shape == (2, 2, 3)
    assert_close(model.eval()(x), both.mean(1))
    assert vit(distilled=True, num_classes=0)(x).shape == (2, 16)


def test_features_without_a_head() -> None:
    model, x = vit(num_classes=0), images()
    assert_close(model(x), model.encoder(model.embed(x)).last[:, 0])


def test_order_of_patches() -> None:
    """Without positions the patches are a set; with them, or with rotary ones, they are not."""
    x = images()
    shuffled = torch.cat([x[..., 4:8], x[..., :4], x[..., 8:]], dim=-1)
    model = vit(position="none")
    assert_close(model(shuffled), model(x))
    for fields in ({}, {"position": "none", "rope": "half"}):
        model = vit(**fields)
        assert (model(shuffled) - model(x)).abs().max() > 1e-3


@pytest.mark.parametrize("prefix_position", [True, False])
def test_position_of_prefix(prefix_position: bool) -> None:
    """Registers and class token have positions of their own, or none."""
    model = vit(num_registers=2, prefix_position=prefix_position)
    prefix = model.embed(images())[:, :3]
    added = model.position[:3] if prefix_position else 0
    assert_close(prefix, (model.prefix + added).expand(2, -1, -1))
    assert len(model.position) == (9 if prefix_position else 6)


def test_rectangles() -> None:
    """Image and patch of any shape; the token at row i, column j is the patch there."""
    model = vit(image_size=(6, 20), patch_size=(3, 5), in_channels=1, position="none", class_token=False, pool="mean")
    x = torch.zeros(1, 1, 6, 20)
    x[:, :, 3:6, 10:15] = 1
    tokens = model.embed(x)[0]
    assert model.config.grid == (2, 4)
    different = (tokens != tokens[0]).any(1)
    assert different.nonzero().flatten().tolist() == [1 * 4 + 2]


def test_conv_stem() -> None:
    """As many tokens as with patches, each from where its patch is; an image's tokens are its own."""
    model = vit(image_size=(32, 48), conv_stem=True, position="none", class_token=False, pool="mean")
    x = torch.randn(2, 3, 32, 48)
    tokens = model.embed(x)
    assert tokens.shape == (2, 8 * 12, 16)
    assert_close(model.embed(x[1:]), tokens[1:])
    maps = model.patch_embed.convs(x)  # [B, D, h, w]
    assert_close(tokens[:, 3 * 12 + 5], model.patch_embed.proj(maps[:, :, 3, 5]))
    gradient = torch.randn_like(tokens)
    model.embed(x).backward(gradient)
    assert all(parameter.grad.isfinite().all() for parameter in model.patch_embed.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": (4, 2)}, "conv_stem with patch_size 4 x 2, expected a square"),
        ({"image_size": 12, "patch_size": 6}, "conv_stem with patch_size 6 x 6, expected a square"),
        ({"patch_size": 1}, "conv_stem with patch_size 1 x 1, expected a square"),
        ({"embed_dim": 24}, "conv_stem with embed_dim 24, expected a multiple of 16"),
    ],
    ids=str,
)
def test_what_a_conv_stem_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vit(conv_stem=True, **fields)


def test_patch_dropout() -> None:
    """In training alone: the prefix stays, the right number of patches stays, none twice, and each row has its own."""
    model = vit(image_size=32, num_registers=1, patch_dropout=0.75)
    x = torch.randn(3, 3, 32, 32)
    full = model.embed(x)
    kept = model.train().embed(x)
    assert full.shape[1] == 2 + 64
    assert kept.shape[1] == 2 + 16
    assert kept[:, :2].equal(full[:, :2])
    chosen = [(full[row, None, 2:] == kept[row, 2:, None]).all(-1).nonzero()[:, 1] for row in range(3)]
    assert all(len(set(row.tolist())) == 16 for row in chosen)
    assert not chosen[0].sort().values.equal(chosen[1].sort().values)
    assert model(x).shape == (3, 3)


def test_features_on_request() -> None:
    """Tokens and weights of the layers asked for; the others stay on the model's kernel."""
    model, x = vit(depth=3, num_registers=1, attention="sdpa"), images()
    called: list[int] = []
    for i, block in enumerate(model.encoder.blocks):
        block.self_attn.kernel.register_forward_hook(lambda *_, i=i: called.append(i))
    out = model.features(x, layers=[0, 2], attention=[1])
    assert called == [0, 2]
    assert [tokens.shape for tokens in out.layers] == [(2, 8, 16)] * 2
    assert [weights.shape for weights in out.attention] == [(2, 4, 8, 8)]
    assert_close(out.attention[0].sum(-1), torch.ones(2, 4, 8))
    assert_close(model.head(model.encoder.norm(out.layers[1])[:, 0]), model(x))
    for asked in ({"layers": [3]}, {"attention": [-1]}):
        with pytest.raises(ValueError, match="the model has blocks 0 to 2"):
            model.features(x, **asked)


@pytest.mark.parametrize(
    ("size", "patch", "published", "count"),
    [
        ("Ti", 16, "vit_tiny_patch16_224", 5_717_416),
        ("S", 16, "vit_small_patch16_224", 22_050_664),
        ("B", 16, "vit_base_patch16_224", 86_567_656),
        ("L", 16, "vit_large_patch16_224", 304_326_632),
        ("H", 14, "vit_huge_patch14_224", 632_045_800),
    ],
)
def test_published_sizes(size: str, patch: int, published: str, count: int) -> None:
    with torch.device("meta"):
        ours, theirs = ViT(ViTConfig(patch_size=patch, **SIZES[size])), timm.create_model(published, num_classes=1000)
    for model in (ours, theirs):
        assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("prefix", [{}, {"num_registers": 2, "prefix_position": False}], ids=str)
def test_weights_of_another_image_size(prefix: dict[str, Any]) -> None:
    """Every multiple of the patch size takes them, a rectangle turned on its side too; the prefix is untouched."""
    source = vit(image_size=(12, 20), **prefix)
    for height in range(4, 29, 4):
        target = vit(image_size=(height, 32 - height), **prefix)
        state = target.adapt_state_dict(source.state_dict(), source.config)
        target.load_state_dict(state)
        x = torch.randn(1, 3, height, 32 - height)
        assert target(x).isfinite().all()
        if source.config.prefix_position:
            assert target.position[0].equal(source.position[0])


@pytest.mark.parametrize("shape", [(2, 3, 12, 8), (2, 1, 8, 12), (3, 8, 12)], ids=str)
def test_wrong_image(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images have shape .*, expected \[B, 3, 8, 12\]"):
        vit()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": (8, 13)}, "image_size 8 x 13 is not a multiple of patch_size 4 x 4"),
        ({"patch_size": 0}, "patch_size is 0, expected at least 1"),
        ({"num_classes": -1}, "num_classes is -1, expected at least 0"),
        ({"patch_dropout": 1.0}, r"patch_dropout is 1.0, expected a rate in \[0, 1\)"),
        ({"class_token": False}, "pool is 'cls' but class_token is false; expected pool 'mean'"),
        ({"distilled": True, "pool": "mean"}, "distilled needs pool 'cls' and no registers"),
    ],
    ids=str,
)
def test_refused_configurations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ViTConfig(**{**TINY, **fields})


def test_state_dict_names() -> None:
    """Checkpoints depend on them, and so do the layers and the weight decay that the optimizer sees."""
    model = vit(depth=1, num_registers=1, pre_norm=True)
    around = {name for name in model.state_dict() if not name.startswith("encoder.blocks.0.")}
    assert around == {
        "prefix", "position", "patch_embed.proj.weight", "patch_embed.proj.bias", "pre_norm.weight", "pre_norm.bias",
        "encoder.norm.weight", "encoder.norm.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert model.no_weight_decay() <= around
    layers = {name: model.layer_id(name) for name in model.state_dict()}
    assert {layers[name] for name in ("prefix", "position", "patch_embed.proj.weight", "pre_norm.bias")} == {0}
    assert layers["encoder.blocks.0.mlp.fc1.weight"] == 1
    assert layers["encoder.norm.weight"] == layers["head.bias"] == model.num_layers - 1 == 2


def test_compiles_as_one_graph() -> None:
    """In training and at inference."""
    model, x = vit(depth=1, num_registers=1, drop_path=(0.1,), patch_dropout=0.5, layer_scale=0.1), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), model(x))
    compiled.train()
    compiled(x).sum().backward()
    assert model.prefix.grad.isfinite().all()


def test_exports_with_a_free_batch_size() -> None:
    model = vit(num_registers=1)
    program = torch.export.export(model, (images(),), dynamic_shapes={"images": {0: torch.export.Dim("batch")}})
    x = images(5)
    assert_close(program.module()(x), model(x))


def test_bf16_autocast() -> None:
    """The residual stream stays float32, the head's output is bfloat16 as any Linear's."""
    model, x = vit(), images()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.features(x, layers=[0]).layers[0].dtype == torch.float32
        out = model(x)
    assert (out - model(x)).abs().max() < 0.05
