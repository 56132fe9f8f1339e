"""Published Vision Transformers of the same size."""

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.models.vit import ViTConfig
from multimodal.pretrained import hf_vit, timm_folder
from tasks.peers import Attention, exported, from_pretrained, peer, plain
from tasks.vit.bench import step
from tasks.workload import Data, Peer, Setting, Workload


def peers(work: Workload, setting: Setting) -> list[Peer]:
    """timm and Hugging Face have our weights; the others have the same size, in their own order of norms and biases."""
    config: ViTConfig = work.config
    if "optimizer" in work.facts:
        return _optimizers(config, setting)

    def run(model: Any, data: Data) -> Tensor:
        found = model(data["image"])
        logits: Tensor = getattr(found, "logits", found)
        return F.cross_entropy(logits, data["label"]) if work.trains else logits

    return [
        peer("timm", "timm", work, setting, lambda kind: _timm(config, kind), run),
        peer("Hugging Face", "transformers", work, setting, lambda kind: _hugging_face(config, kind), run),
        peer("torchvision", "torchvision", work, setting, lambda kind: _torchvision(config, kind), run),
        peer("vit-pytorch", "vit-pytorch", work, setting, lambda _: _vit_pytorch(config), run, ("plain",)),
        peer("x-transformers", "x-transformers", work, setting, lambda kind: _x_transformers(config, kind), run),
    ]


def _optimizers(config: ViTConfig, setting: Setting) -> list[Peer]:
    """torch's other implementations of the same: a loop over weights, its default on CPU, and its default on CUDA."""

    def of(name: str, foreach: bool) -> Peer:
        forms = {f"foreach={foreach}": lambda data: step(config, setting, foreach=foreach)}
        return Peer(name=f"torch's AdamW, {name}", package="torch", forms=forms)

    return [of("loop", False), of("foreach", True)]


def _timm(config: ViTConfig, kind: Attention) -> nn.Module:
    import timm

    def read(folder: Path) -> nn.Module:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)

    model: nn.Module = exported("vit", config, timm_folder.write_folder, read)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = kind == "fused"  # type: ignore[assignment]
    return model


def _hugging_face(config: ViTConfig, kind: Attention) -> nn.Module:
    from transformers import ViTForImageClassification

    model: nn.Module = exported(
        "vit", config, hf_vit.to_hf, lambda out: from_pretrained(ViTForImageClassification, out, kind)
    )
    return model


def _torchvision(config: ViTConfig, kind: Attention) -> nn.Module:
    from torchvision.models import VisionTransformer

    (height, width), (p, q) = config.image_hw, config.patch_hw
    if height != width or p != q or config.in_channels != 3 or config.pool != "cls":
        raise ValueError("torchvision's ViT takes square images of three channels, and has a class token")
    model = VisionTransformer(
        image_size=height,
        patch_size=p,
        num_layers=config.depth,
        num_heads=config.num_heads,
        hidden_dim=config.embed_dim,
        mlp_dim=round(config.embed_dim * config.mlp_ratio),
        num_classes=config.num_classes,
    )
    return model if kind == "fused" else plain(model)


def _vit_pytorch(config: ViTConfig) -> nn.Module:
    from vit_pytorch import ViT

    model: nn.Module = ViT(
        image_size=config.image_hw,
        patch_size=config.patch_hw,
        num_classes=config.num_classes,
        dim=config.embed_dim,
        depth=config.depth,
        heads=config.num_heads,
        dim_head=config.embed_dim // config.num_heads,
        mlp_dim=round(config.embed_dim * config.mlp_ratio),
        pool=config.pool,
        channels=config.in_channels,
    )
    return model


def _x_transformers(config: ViTConfig, kind: Attention) -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    (height, width), (p, q) = config.image_hw, config.patch_hw
    if height != width or p != q:
        raise ValueError("x-transformers' ViT takes square images")
    layers = Encoder(
        dim=config.embed_dim,
        depth=config.depth,
        heads=config.num_heads,
        attn_dim_head=config.embed_dim // config.num_heads,
        ff_mult=config.mlp_ratio,
        attn_flash=kind == "fused",
    )
    model: nn.Module = ViTransformerWrapper(
        image_size=height,
        patch_size=p,
        channels=config.in_channels,
        num_classes=config.num_classes,
        attn_layers=layers,
    )
    return model
