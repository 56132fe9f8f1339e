"""Whole Vision Transformers against timm: every name that timm serves, weights in and out."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint, load, read
from multimodal.pretrained.keymap import KeyMap
from multimodal.pretrained.record import template
from multimodal.pretrained.timm_vit import config_of, refusal, rules, to_timm

NAMES = sorted(timm.list_models(module="vision_transformer") + timm.list_models(module="deit"))

# Every name that is not covered, by the reason given.
REFUSED = {
    "it has a norm inside attention": ["beit3_base_patch16_224", "beit3_giant_patch14_224", "beit3_giant_patch14_336",
                                       "beit3_large_patch16_224"],
    "it pools by 'map'": ["test_vit3", "vit_base_patch16_siglip_224", "vit_base_patch16_siglip_256",
                          "vit_base_patch16_siglip_384", "vit_base_patch16_siglip_512", "vit_base_patch32_siglip_256",
                          "vit_giantopt_patch16_siglip_256", "vit_giantopt_patch16_siglip_384",
                          "vit_large_patch16_siglip_256", "vit_large_patch16_siglip_384",
                          "vit_large_patch16_siglip_512", "vit_so150m_patch16_reg4_map_256",
                          "vit_so400m_patch14_siglip_224", "vit_so400m_patch14_siglip_378",
                          "vit_so400m_patch14_siglip_384", "vit_so400m_patch16_siglip_256",
                          "vit_so400m_patch16_siglip_384", "vit_so400m_patch16_siglip_512"],
    "its blocks are ParallelThingsBlock": ["vit_base_patch16_18x2_224", "vit_small_patch16_18x2_224"],
    "its blocks are ResPostBlock": ["vit_base_patch16_rpn_224"],
    "its blocks are ParallelScalingBlock": ["vit_base_patch16_xp_224", "vit_huge_patch14_xp_224",
                                            "vit_large_patch14_xp_224", "vit_pwee_patch16_reg1_gap_256"],
    "its blocks are DiffParallelScalingBlock": ["vit_dpwee_patch16_reg1_gap_256"],
    "its attention is DiffAttention": ["vit_dlittle_patch16_reg1_gap_256", "vit_dwee_patch16_reg1_gap_256"],
    "its image size (384, 384) is not a multiple of its patch size (14, 14)": ["vit_so400m_patch14_siglip_gap_384"],
}  # fmt: skip
REASON = {name: reason for reason, names in REFUSED.items() for name in names}


def stirred(module: Any, noise: float = 0.2) -> Any:
    """In evaluation mode, and no weight is a special number such as 0 or 1."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return module.eval()


def shrunken(name: str, patch: tuple[int, int], **options: Any) -> Any:
    """The same architecture at one block, a small width and a rectangular image."""
    size = (2 * patch[0], 3 * patch[1])
    return stirred(timm.create_model(name, depth=1, embed_dim=48, num_heads=3, img_size=size, num_classes=5, **options))


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error, bound = (ours - theirs).abs().max().item(), 1e-5 * max(1.0, theirs.abs().max().item())
    assert error <= bound, f"{error} > {bound}"


def assert_same_weights(exported: dict[str, Tensor], module: nn.Module) -> None:
    original = module.state_dict()
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name


def images(model: ViT, batch: int = 2) -> Tensor:
    return torch.randn(batch, model.config.in_channels, *model.config.image_hw)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_equal_or_refused_with_its_reason(name: str) -> None:
    with torch.device("meta"):
        full: Any = timm.create_model(name, depth=1)
    if name in REASON:
        assert refusal(full) == REASON[name]
        with pytest.raises(ValueError, match="not covered, because ") as caught:
            read(full)
        assert REASON[name] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    assert refusal(full) is None
    packed = type(full.blocks[0].mlp).__name__ != "SwiGLU"
    config = config_of(full, name)
    shapes = {key: tensor.shape for key, tensor in full.state_dict().items()}
    published = KeyMap(rules(config, packed=packed), template("vit", config)).theirs
    assert {key: tensor.shape for key, tensor in published.items()} == shapes

    module = shrunken(name, full.patch_embed.patch_size)
    ours = load(module).model
    x = images(ours)
    with torch.no_grad():
        assert_equal(ours(x), module(x))
    exported = to_timm(Checkpoint.of("vit", ours), packed=packed)
    assert_same_weights(exported, module)
    shrunken(name, full.patch_embed.patch_size).load_state_dict(exported, strict=True)


def test_every_refused_name_is_one_of_timms() -> None:
    assert REASON.keys() <= set(NAMES)
    assert len(REASON) == sum(map(len, REFUSED.values())) == 33


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"num_classes": 0},
        {"in_chans": 1},
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"fc_norm": True},
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "global_pool": "avg", "reg_tokens": 2, "no_embed_class": True},
        {"reg_tokens": 3},
        {"reg_tokens": 3, "no_embed_class": True},
        {"init_values": 0.1},
        {"pre_norm": True},
        {"final_norm": False},
        {"pos_embed": "none"},
        {"qkv_bias": False, "proj_bias": False},
        {"mlp_ratio": 2.5, "act_layer": "relu"},
        {"act_layer": "quick_gelu"},
        {"act_layer": "gelu_tanh"},
        {"act_layer": nn.GELU},
        {"act_layer": partial(nn.GELU, "tanh")},
        {"norm_layer": "rmsnorm"},
        {"patch_size": (8, 4)},
        {"dynamic_img_size": True},
    ],
    ids=str,
)
def test_every_option_alone(options: dict[str, Any]) -> None:
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": (32, 48), "patch_size": 8, "num_classes": 5}
    module = stirred(VisionTransformer(**(small | options)))
    checkpoint = read(module)
    assert checkpoint.preprocess is None
    assert checkpoint.labels is None
    ours = load(module).model
    x = images(ours)
    with torch.no_grad():
        assert_equal(ours(x), module(x))
    assert_same_weights(to_timm(checkpoint), module)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"global_pool": "avgmax"}, "it pools by 'avgmax'"),
        ({"global_pool": "max"}, "it pools by 'max'"),
        ({"global_pool": ""}, "it pools by ''"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "its pooling includes the prefix tokens"),
        ({"scale_attn_norm": True}, "it has a norm inside attention"),
        ({"scale_mlp_norm": True}, "it has a norm inside the MLP"),
        ({"dynamic_img_pad": True}, "it pads images to whole patches"),
        ({"act_layer": "hard_swish"}, "its MLP is Mlp"),
        ({"norm_layer": "batchnorm1d"}, "its norms are"),
    ],
    ids=str,
)
def test_what_is_refused_beyond_the_names(options: dict[str, Any], reason: str) -> None:
    with torch.device("meta"):
        module = VisionTransformer(embed_dim=48, depth=1, num_heads=3, **options)
    assert (refusal(module) or "").startswith(reason)


@pytest.mark.parametrize("name", ["resnet18", "eva02_tiny_patch14_224", "vit_small_r26_s32_224", "mixer_s32_224"])
def test_other_architectures_are_refused(name: str) -> None:
    with torch.device("meta"):
        module = timm.create_model(name)
    with pytest.raises(ValueError, match=r"not covered, because its (class|patch embedding) is "):
        read(module)


def test_full_size_logits_layers_and_attention() -> None:
    module = stirred(timm.create_model("vit_tiny_patch16_224"), 0.02)
    loaded = load(module)
    ours, x = loaded.model, images(loaded.model, 1)
    weights: list[Tensor] = []
    for block in module.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, _inputs, output: weights.append(output))
    every = range(ours.config.depth)
    with torch.no_grad():
        assert_equal(ours(x), module(x))
        weights.clear()
        _, layers = module.forward_intermediates(x, return_prefix_tokens=True, output_fmt="NLC")
        features = ours.features(x, layers=every, attention=every)
    assert len(features.layers) == len(features.attention) == len(layers) == len(weights) == 12
    for mine, (patches, prefix) in zip(features.layers, layers, strict=True):
        assert_equal(mine, torch.cat([prefix, patches], dim=1))
    for mine, theirs in zip(features.attention, weights, strict=True):
        assert_equal(mine, theirs)
        assert_equal(mine.sum(-1), torch.ones_like(mine.sum(-1)))


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_base_patch16_reg4_gap_256", "aimv2_large_patch14_224"],
)
def test_gradients(name: str) -> None:
    with torch.device("meta"):
        patch = timm.create_model(name, depth=1).patch_embed.patch_size
    module = shrunken(name, patch).train()
    ours = load(module).model.train()
    x = images(ours)
    for model in (ours, module):
        model(x).square().mean().backward()
    packed = not name.startswith("aimv2")
    rule = rules(ours.config, packed=packed)
    gradients = {key: parameter.grad for key, parameter in module.named_parameters()}
    expected = KeyMap(rule, template("vit", ours.config)).to_ours(gradients, name)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for key, parameter in ours.named_parameters():
        # Some gradients are zero but for rounding: that of a key's bias, for one.
        scale = max(expected[key].abs().max().item(), 1e-2 * largest)
        assert_equal(parameter.grad / scale, expected[key] / scale)


def test_a_distilled_model_trains_both_heads() -> None:
    module = shrunken("deit_tiny_distilled_patch16_224", (16, 16)).train()
    module.set_distilled_training(True)
    ours = load(module).model.train()
    x = images(ours)
    assert_equal(ours(x), torch.stack(module(x), dim=1))


def test_rates_that_only_training_uses_are_taken_over() -> None:
    rates = {"drop_rate": 0.1, "patch_drop_rate": 0.2, "proj_drop_rate": 0.3, "attn_drop_rate": 0.4}
    module = timm.create_model("vit_tiny_patch16_224", depth=3, drop_path_rate=0.2, **rates)
    config = config_of(module, "")
    assert config.drop_path == pytest.approx((0.0, 0.1, 0.2))
    assert replace(config, drop_path=0.0) == ViTConfig(
        embed_dim=192,
        depth=3,
        num_heads=3,
        head_dropout=0.1,
        patch_dropout=0.2,
        dropout=0.3,
        mlp_dropout=0.3,
        attention_dropout=0.4,
    )


def test_another_image_size_is_what_timm_makes_of_it() -> None:
    for name in ("vit_tiny_patch16_224", "deit3_small_patch16_224", "vit_medium_patch16_reg4_gap_256"):
        module = stirred(timm.create_model(name, depth=1, embed_dim=48, num_heads=3, num_classes=5))
        ours = load(module, changes={"image_size": (64, 96)}).model
        module.set_input_size(img_size=(64, 96))
        x = images(ours)
        with torch.no_grad():
            assert_equal(ours(x), module(x))
