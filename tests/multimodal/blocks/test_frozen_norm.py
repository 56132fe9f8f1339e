"""Frozen batch norms within convolutions: the same results as timm's, and the same keys."""

import copy

import pytest
import timm
import torch
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn

from multimodal.blocks.backbone import TimmBackbone
from multimodal.blocks.frozen_norm import InplaceReLU6, NormedConv2d, fold_norms

# Residual, inverted with TensorFlow's padding or without, plain with biases, with norms before convolutions.
NETS = ["resnet18", "resnet18d", "tf_efficientnet_lite0", "mobilenetv2_050", "vgg11_bn", "densenet121"]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A model of timm with frozen norms of all kinds of values, and the same with its norms folded."""
    torch.manual_seed(0)
    plain = freeze_batch_norm_2d(timm.create_model(name, features_only=True, out_indices=(-1,)))
    for key, value in plain.state_dict().items():
        if key.endswith("running_var"):
            value.uniform_(0.5, 2.0)
        elif value.ndim == 1:
            value.add_(torch.randn_like(value) * 0.1)
    folded = copy.deepcopy(plain)
    fold_norms(folded, 3)
    return plain.eval(), folded.eval()


@pytest.mark.parametrize("name", NETS)
def test_folded_is_plain(name: str) -> None:
    plain, folded = pair(name)
    assert any(isinstance(module, NormedConv2d) for module in folded.modules())
    assert list(folded.state_dict()) == list(plain.state_dict())
    images = torch.randn(2, 3, 64, 96)
    expected, found = plain(images)[0], folded(images)[0]
    scale = expected.detach().abs().max()
    assert (found - expected).abs().max() <= 1e-5 * scale
    (expected / scale).sum().backward(), (found / scale).sum().backward()
    gradients = zip(plain.named_parameters(), folded.parameters(), strict=True)
    for (key, theirs), ours in gradients:
        if theirs.grad is not None:
            assert ours.grad is not None
            off = (ours.grad - theirs.grad).norm() / theirs.grad.norm().clamp(min=1e-12)
            assert off <= 1e-3, key  # a ReLU at zero may fall to either side


def test_every_norm_of_a_resnet_and_of_an_efficientnet_is_folded() -> None:
    for name in ("resnet18", "tf_efficientnet_lite0"):
        net = TimmBackbone(name).net
        convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
        assert all(isinstance(module, NormedConv2d) for module in convolutions), name


def test_what_is_loaded_or_copied_later_is_used() -> None:
    plain, folded = pair("resnet18")
    with torch.no_grad():
        for net in (plain, folded):
            net.get_submodule("layer4.1.bn2").bias += 3.0
            net.get_submodule("conv1").weight *= 2.0
    copied = copy.deepcopy(folded)
    fresh = TimmBackbone("resnet18")
    fresh.net.load_state_dict(plain.state_dict())
    images = torch.randn(1, 3, 64, 64)
    expected = plain(images)[0]
    for found in (folded(images)[0], copied(images)[0], fresh(images)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        copied.get_submodule("layer4.1.bn2").bias += 1.0
    torch.testing.assert_close(folded(images)[0], expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(copied(images)[0], expected, atol=1e-2)


def test_bfloat16() -> None:
    plain, folded = pair("tf_efficientnet_lite0")
    images = torch.randn(1, 3, 64, 64)
    expected = plain(images)[0]
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = folded(images)[0]
    assert under_autocast.dtype == torch.bfloat16
    for found in (under_autocast, folded.bfloat16()(images.bfloat16())[0]):
        assert (found.float() - expected).norm() <= 0.05 * expected.norm()


def test_relu6_is_torchs() -> None:
    x = torch.randn(1000) * 6
    x[:3] = torch.tensor([0.0, 6.0, float("nan")])
    weight = torch.randn(1000)

    def run(activation: nn.Module | type[InplaceReLU6]) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = activation.apply(leaf * 1.0) if activation is InplaceReLU6 else activation(leaf * 1.0)
        (y * weight).sum().backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    for ours, theirs in zip(run(InplaceReLU6), run(nn.ReLU6(inplace=True)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
