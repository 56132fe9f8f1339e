"""Cached decoding equals the full forward pass: prefill, steps, chunks, and what is done to a cache in between."""

from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.attention import KVCache
from multimodal.attention.kernels import kernel_class, kernel_names
from multimodal.blocks import Stack, StackConfig
from tests.parity.keys import assert_close, randomize

LENGTH = 10
CACHING = [name for name in kernel_names() if kernel_class(name).supports.issuperset({"cache", "causal", "cross"})]


def decoder(**fields: Any) -> Stack:
    config = StackConfig(**{"embed_dim": 16, "depth": 2, "num_heads": 4, "num_kv_heads": 2, "rope": "half", **fields})
    return randomize(Stack(config, causal=True, context_dim=12))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3, LENGTH, 16), torch.randn(3, 5, 12)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[10], [1] * 10, [4, 1, 1, 4], [1, 9]], ids=str)
@pytest.mark.parametrize("rope", [None, "half", "interleaved"])
@pytest.mark.parametrize("kernel", CACHING)
def test_equals_full_forward(kernel: str, rope: str | None, chunks: list[int]) -> None:
    """With padded tokens and a padded context; the context is given once."""
    stack, (x, context) = decoder(attention=kernel, rope=rope), inputs()
    key_mask = torch.arange(LENGTH) >= torch.tensor([[0], [0], [2]])
    context_key_mask = torch.arange(5) < torch.tensor([[5], [3], [5]])
    expected = stack(x, context, key_mask=key_mask, context_key_mask=context_key_mask).last
    cache, start = stack.make_cache(LENGTH), 0
    for length in chunks:
        end = start + length
        given = context if start == 0 else None
        out = stack(x[:, start:end], given, key_mask=key_mask[:, :end], context_key_mask=context_key_mask, cache=cache)
        assert_close(out.last, expected[:, start:end])
        start = cache.length
    assert start == LENGTH


def test_cached_chunk_has_no_causal_leak() -> None:
    """By gradient, through the whole stack: output i of the chunk depends on no later token of it."""
    stack, (x, context) = decoder(), inputs()
    cache = stack.make_cache(LENGTH)
    with torch.no_grad():
        stack(x[:, :6], context, cache=cache)
    chunk = x[:, 6:].requires_grad_()
    out = stack(chunk, cache=cache).last
    for i in range(4):
        (gradient,) = torch.autograd.grad(out[:, i].square().sum(), chunk, retain_graph=True)
        reached = gradient.abs().sum((0, 2))
        assert (reached[: i + 1] > 0).all()
        assert (reached[i + 1 :] == 0).all()


@torch.no_grad()
def test_reorder_equals_reordering_the_input() -> None:
    """Beams: a row may be dropped, doubled, and the batch may grow."""
    stack, (x, context) = decoder(), inputs()
    index = torch.tensor([2, 0, 0, 1])
    expected = stack(x[index], context[index]).last
    cache = stack.make_cache(LENGTH)
    stack(x[:, :4], context, cache=cache)
    cache.reorder(index)
    assert_close(stack(x[index, 4:], cache=cache).last, expected[:, 4:])


@torch.no_grad()
def test_crop_forgets_tokens_and_keeps_the_context() -> None:
    stack, (x, context) = decoder(), inputs()
    expected = stack(x, context).last
    cache = stack.make_cache(LENGTH)
    stack(torch.cat([x[:, :4], torch.randn(3, 5, 16)], 1), context, cache=cache)
    cache.crop(4)
    assert cache.length == 4
    assert_close(stack(x[:, 4:], cache=cache).last, expected[:, 4:])


@torch.no_grad()
def test_reset_forgets_all() -> None:
    """Another batch size and another context may follow."""
    stack, (x, context) = decoder(), inputs()
    cache = stack.make_cache(LENGTH)
    stack(x, context, cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match="needs a context"):
        stack(x[:2], cache=cache)
    cache.reset()
    assert_close(stack(x[:2], context[1:], cache=cache).last, stack(x[:2], context[1:]).last)


@torch.no_grad()
def test_only_with_a_cache() -> None:
    """Selecting tokens still stores the keys of all."""
    stack, (x, context) = decoder(), inputs()
    expected = stack(x, context).last
    cache = stack.make_cache(LENGTH)
    assert_close(stack(x[:, :6], context, cache=cache, only=slice(-1, None)).last, expected[:, 5:6])
    assert_close(stack(x[:, 6:], cache=cache, only=slice(-1, None)).last, expected[:, -1:])


def test_buffers_are_allocated_once() -> None:
    cache = KVCache(4)
    cache.append(torch.zeros(2, 1, 3, 8), torch.zeros(2, 1, 3, 8))
    pointer = cache.keys.data_ptr()
    keys, _ = cache.append(torch.ones(2, 1, 1, 8), torch.zeros(2, 1, 1, 8))
    assert keys.data_ptr() == pointer
    assert keys[0, 0, :, 0].tolist() == [0, 0, 0, 1]


def test_misuse() -> None:
    cache, one = KVCache(4), torch.zeros(2, 1, 1, 8)
    with pytest.raises(ValueError, match="the cache is empty"):
        cache.read()
    cache.append(one.expand(-1, -1, 3, -1), one.expand(-1, -1, 3, -1))
    with pytest.raises(ValueError, match="cache of 4 tokens cannot take 2 more after 3"):
        cache.append(one.expand(-1, -1, 2, -1), one.expand(-1, -1, 2, -1))
    with pytest.raises(ValueError, match="cache of 2 rows is given 1"):
        cache.append(one[:1], one[:1])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot crop a cache of 3 tokens to {length}"):
            cache.crop(length)


@torch.no_grad()
def test_a_context_lies_head_by_head() -> None:
    """As the kernels read it at each step, whatever the layout that the projections leave it in."""
    cache = KVCache(LENGTH, fixed=True)
    keys, values = (torch.randn(3, 5, 2, 4).transpose(1, 2) for _ in range(2))
    found = cache.append(keys, values)
    for kept, given in zip((*found, *cache.read()), (keys, values) * 2, strict=True):
        assert kept.is_contiguous()
        assert torch.equal(kept, given)
