"""How five families initialise a stack, biases included; norms keep ones and zeros.

D embed_dim, L depth
"""

import math
from typing import TYPE_CHECKING, Literal, get_args

from torch import nn

if TYPE_CHECKING:
    from multimodal.attention import Attention
    from multimodal.blocks.block import Block

InitScheme = Literal["vit", "clip", "clip_vision", "detr", "whisper", "gpt2"]


def _attentions(block: "Block") -> "list[Attention]":
    return [a for a in (block.self_attn, block.cross_attn) if a is not None]


def _mlp_linears(block: "Block") -> list[nn.Linear]:
    return [module for module in block.mlp.modules() if isinstance(module, nn.Linear)]


def init_linear(linear: nn.Linear, std: float) -> None:
    """Normal weight, zero bias."""
    nn.init.normal_(linear.weight, std=std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def init_convolution(convolution: nn.Conv2d) -> None:
    """Normal weight by the fan-out ("Delving Deep into Rectifiers", He et al. 2015), for one without a bias."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _init_clip(block: "Block", width: int, depth: int) -> None:
    """OpenAI CLIP's text tower, `initialize_parameters`: stds from width and depth; the biases of the MLP are kept."""
    branch_std = width**-0.5 * (2 * depth) ** -0.5
    for attention in _attentions(block):
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            init_linear(projection, width**-0.5)
        init_linear(attention.out_proj, branch_std)
    for linear in _mlp_linears(block):
        nn.init.normal_(linear.weight, std=branch_std if linear is block.mlp.fc2 else (2 * width) ** -0.5)


def _init_attention(attention: "Attention") -> None:
    """`nn.MultiheadAttention`: q, k, v Xavier uniform by the bound of the fused (3D, D) matrix; zero biases."""
    fan_in, fan_out = attention.q_proj.weight.shape[1], attention.q_proj.weight.shape[0]
    bound = math.sqrt(6 / (fan_in + 3 * fan_out))
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        nn.init.uniform_(projection.weight, -bound, bound)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def _init_clip_vision(block: "Block") -> None:
    """OpenAI CLIP's image tower, which `initialize_parameters` leaves as torch's modules are."""
    for attention in _attentions(block):
        _init_attention(attention)


def _init_detr(block: "Block") -> None:
    """DETR, `_reset_parameters`: Xavier uniform; fc biases kept."""
    for attention in _attentions(block):
        _init_attention(attention)
        nn.init.xavier_uniform_(attention.out_proj.weight)
    for linear in _mlp_linears(block):
        nn.init.xavier_uniform_(linear.weight)


def _init_normal(block: "Block", branch_std: float) -> None:
    """Normal with std 0.02, and `branch_std` for the two projections that end a residual branch."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            init_linear(module, 0.02)
    for linear in (*(a.out_proj for a in _attentions(block)), block.mlp.fc2):
        init_linear(linear, branch_std)


def init_block(block: "Block", scheme: InitScheme, *, width: int, depth: int) -> None:
    """Initialise one block of a stack of `depth` blocks.

    - `vit`, `whisper`: normal, std 0.02 (timm's ViT; HF Whisper).
    - `gpt2`: the same, with 0.02 / √(2L) where a residual branch ends (GPT-2, Decision Transformer).
    - `clip`: stds from width and depth (OpenAI CLIP's text tower).
    - `clip_vision`: torch's own (its image tower).
    - `detr`: Xavier uniform (DETR).
    """
    match scheme:
        case "vit" | "whisper":
            _init_normal(block, 0.02)
        case "gpt2":
            _init_normal(block, 0.02 / math.sqrt(2 * depth))
        case "clip":
            _init_clip(block, width, depth)
        case "clip_vision":
            _init_clip_vision(block)
        case "detr":
            _init_detr(block)
        case _:
            raise ValueError(f"init is {scheme!r}, expected one of {', '.join(get_args(InitScheme))}")
