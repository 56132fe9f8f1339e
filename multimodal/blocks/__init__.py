"""Transformer blocks: what every model of the suite is built from."""

from multimodal.blocks.block import Block, BlockOutput, select_tokens
from multimodal.blocks.embed import AudioStem, ConvEmbed, PatchEmbed
from multimodal.blocks.mlp import Mlp
from multimodal.blocks.position import LearnedPosition, RotaryPosition, resize_grid, sine_2d, sinusoid
from multimodal.blocks.residual import Residual
from multimodal.blocks.stack import Stack, StackConfig, StackOutput

__all__ = [
    "AudioStem",
    "Block",
    "BlockOutput",
    "ConvEmbed",
    "LearnedPosition",
    "Mlp",
    "PatchEmbed",
    "Residual",
    "RotaryPosition",
    "Stack",
    "StackConfig",
    "StackOutput",
    "resize_grid",
    "select_tokens",
    "sine_2d",
    "sinusoid",
]
