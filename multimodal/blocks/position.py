"""Positions: learned tables, the three 1-D sinusoid layouts, 2-D sine, rotary.

B batch, N tokens, D embed_dim, K head_dim, (h, w) grid of patches or pixels
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.attention.rope import Rope, RopeLayout

SinusoidLayout = Literal["interleaved", "half", "whisper"]


class LearnedPosition(nn.Module):
    """A learned vector per position.

    Args:
        max_length: number of positions.
        embed_dim: width.
        std: of the normal initialisation.
    """

    def __init__(self, max_length: int, embed_dim: int, *, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, embed_dim).normal_(std=std))

    def forward(self, length: int, offset: int = 0) -> Tensor:
        """Vectors [length, D] of the positions from `offset`; ValueError past the last one."""
        if offset + length > len(self.weight):
            raise ValueError(f"positions up to {offset + length} asked of a table of {len(self.weight)}")
        return self.weight[offset : offset + length]


def sinusoid(length: int, dim: int, layout: SinusoidLayout = "interleaved", *, max_period: float = 10000.0) -> Tensor:
    """Fixed sinusoid table [length, dim], float32, in one of the layouts that published models use.

    - `interleaved`: sin and cos alternate ("Attention Is All You Need", section 3.5).
    - `half`: all sines, then all cosines; same frequencies (Marian, tensor2tensor).
    - `whisper`: halves, with frequencies spaced over dim/2 - 1 steps, so that the last is exactly 1 / max_period.
    """
    if dim % 2:
        raise ValueError(f"sinusoid: dim is {dim}, expected an even number")
    half = dim // 2
    steps = half - 1 if layout == "whisper" else half
    frequency = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(max_period) / max(steps, 1)))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency  # [length, dim/2]
    if layout == "interleaved":
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def sine_2d(valid: Tensor, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """2-D sine positions of DETR ("End-to-End Object Detection with Transformers", appendix A.4), normalised to 2π.

    Args:
        valid: bool [B, h, w], True = a real pixel, False = padding; only real pixels count towards a position.
        dim: width of the result, a multiple of 4; the first half tells y, the second x.

    Returns:
        float32 [B, h·w, dim].
    """
    if dim % 4:
        raise ValueError(f"sine_2d: dim is {dim}, expected a multiple of 4")

    def encode(axis: int) -> Tensor:
        position = valid.cumsum(axis, dtype=torch.float32)
        last = position[:, -1:, :] if axis == 1 else position[:, :, -1:]
        return sine(position / (last + 1e-6), dim // 2, temperature=temperature)

    return torch.cat([encode(1), encode(2)], dim=-1).flatten(1, 2)


def sine(position: Tensor, dim: int, *, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines, alternating, of positions [...] as shares of the whole (0 to 1 is 0 to 2π): [..., dim]."""
    frequency = temperature ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=position.device) / dim)
    angle = (position.float() * (2 * math.pi)).unsqueeze(-1) * frequency  # [..., dim/2]
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def resize_grid(position: Tensor, old: tuple[int, int], new: tuple[int, int], *, prefix: int = 0) -> Tensor:
    """Resample learned grid positions to another grid, antialiased bicubic; the prefix tokens' positions are kept.

    Args:
        position: [..., prefix + old_h·old_w, D].
        old, new: grids (h, w); the target size is passed as integers, so no rounding can lose a row.
        prefix: tokens before the grid (class, registers).

    Returns:
        [..., prefix + new_h·new_w, D], in position's dtype.
    """
    if position.shape[-2] != prefix + old[0] * old[1]:
        raise ValueError(f"position table has {position.shape[-2]} rows, expected {prefix} + {old[0]} x {old[1]}")
    if old == new:
        return position
    flat = position.reshape(-1, *position.shape[-2:])
    head, grid = flat[:, :prefix], flat[:, prefix:]
    image = grid.float().unflatten(1, old).permute(0, 3, 1, 2)  # [B, D, h, w]
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    grid = image.flatten(2).transpose(1, 2).to(position.dtype)
    resized = torch.cat([head, grid], dim=1)
    return resized.reshape(*position.shape[:-2], *resized.shape[-2:])


class RotaryPosition(nn.Module):
    """Rotary positions ("RoFormer", Su et al. 2021, section 3.2.2). The angles stay float32
    under autocast and in a model cast to a narrower type.

    Args:
        head_dim: width of a head, even.
        layout: `half` pairs dimension i with i + K/2 (Llama), `interleaved` 2i with 2i + 1 (the paper).
        base: longest period / 2π.
    """

    def __init__(self, head_dim: int, *, layout: RopeLayout = "half", base: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, found {head_dim}")
        self.head_dim = head_dim
        self.layout = layout
        self.base = base

    def forward(self, length: int, offset: int = 0, *, device: torch.device | None = None) -> Rope:
        """Angles of the positions offset … offset + length - 1."""
        # Made at each call, not a buffer: `model.bfloat16()` would round it, and it is K/2 numbers.
        even = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequency = self.base ** (-even / self.head_dim)
        position = torch.arange(offset, offset + length, dtype=torch.float32, device=device)
        angle = position[:, None] * frequency  # [N, K/2]
        angle = torch.cat([angle, angle], -1) if self.layout == "half" else angle.repeat_interleave(2, -1)
        table = (angle.cos(), angle.sin())
        return Rope(query=table, key=table, layout=self.layout)
