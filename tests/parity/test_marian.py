"""HF Marian's sinusoids: all sines, then all cosines."""

from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from multimodal.blocks import sinusoid
from tests.parity.keys import assert_close


def test_sinusoid() -> None:
    assert_close(sinusoid(50, 32, "half"), MarianSinusoidalPositionalEmbedding(50, 32).create_weight())
