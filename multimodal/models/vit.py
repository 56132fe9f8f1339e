"""Vision Transformer ("An Image is Worth 16x16 Words", Dosovitskiy et al. 2021).

B batch, C channels, (H, W) image size, (h, w) grid of patches, P prefix tokens, N = P + h·w tokens, D embed_dim
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from multimodal.blocks import ConvEmbed, PatchEmbed, Stack, StackConfig, resize_grid, select_tokens
from multimodal.blocks.init import init_linear
from multimodal.blocks.residual import build_norm

SIZES = {
    "Ti": {"embed_dim": 192, "depth": 12, "num_heads": 3},
    "S": {"embed_dim": 384, "depth": 12, "num_heads": 6},
    "B": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "L": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "H": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
}
"""The published sizes: `ViTConfig(**SIZES["S"])`. Ti is DeiT's (Touvron et al. 2021)."""


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


@dataclass(frozen=True, kw_only=True)
class ViTConfig(StackConfig):
    """A Vision Transformer: the stack's fields and what is around it."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = StackConfig.TRAINING_ONLY | {"head_dropout", "patch_dropout"}

    norm_eps: float = 1e-6
    """Epsilon of every norm."""
    image_size: int | tuple[int, int] = 224
    """Height and width of the image in pixels; one number for a square."""
    patch_size: int | tuple[int, int] = 16
    """Height and width of a patch in pixels; divides image_size."""
    in_channels: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0 = no head, the model returns pooled features."""
    pool: Literal["cls", "mean"] = "cls"
    """What the head reads: the class token, or the mean of the patch tokens."""
    class_token: bool = True
    """A class token before the patches."""
    num_registers: int = 0
    """Register tokens between class token and patches ("Vision Transformers Need Registers", Darcet et al. 2024)."""
    distilled: bool = False
    """A distillation token with a head of its own; at inference both heads are averaged (DeiT, section 4)."""
    position: Literal["learned", "none"] = "learned"
    """Position embedding added to the tokens."""
    prefix_position: bool = True
    """Whether the prefix tokens have learned positions as well (timm: `no_embed_class` is the reverse)."""
    conv_stem: bool = False
    """Patches by convolutions in place of one projection: learns much sooner from few data (Xiao et al. 2021)."""
    patch_bias: bool = True
    """Bias on the patch projection."""
    patch_norm: bool = False
    """A norm on the projected patches (AIMv2)."""
    pre_norm: bool = False
    """A norm before the first block (CLIP)."""
    pool_norm: bool = False
    """The final norm acts on the pooled feature in place of the tokens (timm: `fc_norm`)."""
    head_dropout: float = 0.0
    """Dropout before the head."""
    patch_dropout: float = 0.0
    """Share of patch tokens left out in training ("FLIP", Li et al. 2023)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (height, width), (p, q) = self.image_hw, self.patch_hw
        for name, least in (
            ("image_size", min(height, width)),
            ("patch_size", min(p, q)),
            ("in_channels", self.in_channels),
        ):
            self._expect(name, least >= 1, "at least 1")
        if height % p or width % q:
            raise ValueError(f"image_size {height} x {width} is not a multiple of patch_size {p} x {q}")
        self._expect("num_classes", self.num_classes >= 0, "at least 0")
        self._expect("num_registers", self.num_registers >= 0, "at least 0")
        for name in ("head_dropout", "patch_dropout"):
            self._expect(name, 0 <= getattr(self, name) < 1, "a rate in [0, 1)")
        if self.pool == "cls" and not self.class_token:
            raise ValueError("pool is 'cls' but class_token is false; expected pool 'mean'")
        if self.patch_dropout and self.rope:
            raise ValueError("patch_dropout leaves out tokens, which gives rope wrong distances; expected one of them")
        if self.distilled and (self.pool != "cls" or self.num_registers):
            raise ValueError("distilled needs pool 'cls' and no registers")

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) of the image in pixels."""
        return _pair(self.image_size)

    @property
    def patch_hw(self) -> tuple[int, int]:
        """(height, width) of a patch in pixels."""
        return _pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """(h, w): patches down and across."""
        return self.image_hw[0] // self.patch_hw[0], self.image_hw[1] // self.patch_hw[1]

    @property
    def num_prefix(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return int(self.class_token) + int(self.distilled) + self.num_registers


class ViTFeatures(NamedTuple):
    """What `ViT.features` returns."""

    layers: tuple[Tensor, ...]
    """Tokens [B, N, D] after each asked-for block, prefix tokens first; no final norm."""
    attention: tuple[Tensor, ...]
    """Attention weights [B, heads, N, N] of each asked-for block."""


class ViT(nn.Module):
    """A Vision Transformer for images of one size."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.embed_dim
        embed = ConvEmbed if config.conv_stem else PatchEmbed
        self.patch_embed = embed(config.patch_hw, config.in_channels, dim, bias=config.patch_bias)
        self.patch_norm = build_norm(config.norm, dim, config.norm_eps) if config.patch_norm else nn.Identity()
        clip_std = dim**-0.5 if config.init in ("clip", "clip_vision") else None
        self.prefix: nn.Parameter | None = None
        if config.num_prefix:
            self.prefix = nn.Parameter(torch.empty(config.num_prefix, dim).normal_(std=clip_std or 1e-6))
        self.position: nn.Parameter | None = None
        if config.position == "learned":
            rows = config.grid[0] * config.grid[1] + (config.num_prefix if config.prefix_position else 0)
            self.position = nn.Parameter(torch.empty(rows, dim).normal_(std=clip_std or 0.02))
        self.pre_norm = build_norm(config.norm, dim, config.norm_eps) if config.pre_norm else nn.Identity()
        self.encoder = Stack(config)
        self.pool_norm: nn.Module = nn.Identity()
        if config.pool_norm:  # one final norm, in one of two places
            self.encoder.norm, self.pool_norm = self.pool_norm, self.encoder.norm
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(dim, config.num_classes) if config.num_classes else nn.Identity()
        self.distilled_head = nn.Linear(dim, config.num_classes) if config.distilled and config.num_classes else None
        for head in (self.head, self.distilled_head):
            if isinstance(head, nn.Linear):
                init_linear(head, 0.02)

    def embed(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] to the tokens [B, N, D] that enter the first block; ValueError for another size."""
        config = self.config
        if images.dim() != 4 or tuple(images.shape[1:]) != (config.in_channels, *config.image_hw):
            expected = (config.in_channels, *config.image_hw)
            raise ValueError(f"images have shape {tuple(images.shape)}, expected [B, {', '.join(map(str, expected))}]")
        x = self.patch_norm(self.patch_embed(images))
        prefix = None if self.prefix is None else self.prefix.expand(x.shape[0], -1, -1)
        if self.position is not None and not config.prefix_position:
            x = x + self.position
        if prefix is not None:
            x = torch.cat([prefix.to(x.dtype), x], dim=1)
        if self.position is not None and config.prefix_position:
            x = x + self.position
        return self.pre_norm(self._drop_patches(x))

    def _drop_patches(self, x: Tensor) -> Tensor:
        """Keep the prefix and a random share of the patches of each image, in training."""
        if not self.training or not self.config.patch_dropout:
            return x
        prefix, patches = self.config.num_prefix, x.shape[1] - self.config.num_prefix
        keep = max(1, round(patches * (1 - self.config.patch_dropout)))
        kept = torch.rand(x.shape[0], patches, device=x.device).argsort(dim=1)[:, :keep]
        kept = kept.sort(dim=1).values  # rotary positions and local attention go by the order
        return torch.cat([x[:, :prefix], select_tokens(x[:, prefix:], kept)], dim=1)

    def forward_features(self, images: Tensor) -> Tensor:
        """Pooled and normed features of images [B, C, H, W]: [B, D], or [B, 2, D] for a distilled model."""
        tokens = self.embed(images)
        if self.config.pool == "mean":
            tokens = self.encoder(tokens).last
            return self.pool_norm(tokens[:, self.config.num_prefix :].mean(dim=1))
        # The head reads the first tokens alone, so the last block need not compute the others.
        heads = 2 if self.config.distilled else 1
        tokens = self.pool_norm(self.encoder(tokens, only=slice(0, heads)).last)
        return tokens if self.config.distilled else tokens[:, 0]

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, C, H, W], or features [B, D] without a head.

        A distilled model in training returns both heads' logits, [B, 2, num_classes].
        """
        features = self.head_dropout(self.forward_features(images))
        if not self.config.distilled:
            return self.head(features)
        second = self.head if self.distilled_head is None else self.distilled_head
        logits = torch.stack([self.head(features[:, 0]), second(features[:, 1])], dim=1)
        return logits if self.training else logits.mean(dim=1)

    def features(self, images: Tensor, *, layers: Collection[int] = (), attention: Collection[int] = ()) -> ViTFeatures:
        """Tokens and attention weights of the blocks asked for by index, in the order of the blocks.

        The other blocks stay on fused attention. ValueError for an index that is no block's.
        """
        for index in (*layers, *attention):
            if not 0 <= index < self.config.depth:
                raise ValueError(f"no block {index}: the model has blocks 0 to {self.config.depth - 1}")
        out = self.encoder(self.embed(images), need_layers=layers, need_weights=attention)
        return ViTFeatures(out.layers, out.self_weights)

    def adapt_state_dict(self, state: dict[str, Tensor], source: ViTConfig) -> dict[str, Tensor]:
        """Another model's weights with its positions resampled to this model's grid; nothing else is changed.

        Args:
            state: state dict of a model built from `source`.
            source: its config.
        """
        if self.position is None or "position" not in state:
            return state
        prefix = source.num_prefix if source.prefix_position else 0
        resized = resize_grid(state["position"], source.grid, self.config.grid, prefix=prefix)
        return {**state, "position": resized}

    def no_weight_decay(self) -> set[str]:
        """Parameters besides norms and biases that take no weight decay."""
        return {"position", "prefix"}

    @property
    def num_layers(self) -> int:
        """Layers for layer-wise learning rates: embeddings, blocks, head."""
        return self.config.depth + 2

    def layer_id(self, name: str) -> int:
        """Layer of a parameter: 0 = embeddings, i + 1 = block i, depth + 1 = final norm and head."""
        parts = name.split(".")
        if parts[:2] == ["encoder", "blocks"]:
            return int(parts[2]) + 1
        before = parts[0] in ("patch_embed", "patch_norm", "prefix", "position", "pre_norm")
        return 0 if before else self.config.depth + 1
