"""Every kernel file against the plain definition, and what all kernels promise: masks, dropout, names, options.

B batch 2, H heads 4, G key/value heads, Nq queries, Nk keys, K head_dim
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal.attention import Attention, kernels
from multimodal.attention.kernels import Kernel, auto, build_kernel, kernel_class, kernel_names
from multimodal.attention.kernels.naive import softmax_attention
from multimodal.attention.masks import causal_mask, merge_masks
from multimodal.blocks import Stack, StackConfig
from tests.parity.keys import assert_close

OPTIONS: dict[str, dict[str, Any]] = {"local": {"window": 3}}
"""Options under which a kernel has something to show at the lengths used here."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one call."""

    queries: int = 11
    keys: int = 11
    head_dim: int = 8
    kv_heads: int = 4
    causal: bool = False
    key_mask: bool = False
    mask: bool = False
    bias: bool = False
    cache: bool = False

    @property
    def needs(self) -> set[str]:
        flags = {name for name in ("causal", "key_mask", "mask", "bias", "cache") if getattr(self, name)}
        return flags | ({"cross"} if self.queries != self.keys and not self.cache else set())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        shapes = [(4, self.queries), (self.kv_heads, self.keys), (self.kv_heads, self.keys)]
        return tuple(torch.randn(2, h, n, self.head_dim, requires_grad=True) for h, n in shapes)  # type: ignore[return-value]

    def arguments(self) -> dict[str, Any]:
        key_mask = torch.arange(self.keys) < torch.tensor([[self.keys], [self.keys - 2]])
        mask = torch.rand(2, 1, self.queries, self.keys) < 0.7
        return {
            "causal": self.causal,
            "key_mask": key_mask if self.key_mask else None,
            "mask": mask if self.mask else None,
            "bias": torch.randn(1, 4, self.queries, self.keys, requires_grad=True) if self.bias else None,
            "scale": self.head_dim**-0.5,
        }


CASES = {
    "plain": Case(),
    "one token": Case(queries=1, keys=1),
    "window divides the length": Case(queries=12, keys=12),
    "odd head_dim": Case(head_dim=5),
    "grouped": Case(kv_heads=2),
    "causal": Case(causal=True),
    "causal, grouped": Case(causal=True, kv_heads=1),
    "key mask": Case(key_mask=True),
    "key mask, grouped": Case(key_mask=True, kv_heads=2),
    "causal, key mask": Case(causal=True, key_mask=True),
    "mask": Case(mask=True),
    "bias": Case(bias=True),
    "bias, key mask": Case(bias=True, key_mask=True),
    "everything": Case(causal=True, key_mask=True, mask=True, bias=True, kv_heads=2),
    "cross": Case(queries=5),
    "cross, more queries": Case(keys=7, key_mask=True, bias=True),
    "cached step": Case(queries=1, causal=True, cache=True),
    "cached chunk": Case(queries=4, causal=True, cache=True),
    "cached chunk, key mask": Case(queries=4, causal=True, cache=True, key_mask=True, kv_heads=2),
}
EXACT = [name for name in kernel_names() if "weights" in kernel_class(name).supports]


def supporting(*needs: str) -> list[str]:
    return [name for name in kernel_names() if kernel_class(name).supports.issuperset(needs)]


def build(name: str, **keywords: Any) -> Kernel:
    return build_kernel(name, OPTIONS.get(name), **keywords)


def naive(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Plain softmax attention over the pairs that the kernel lets attend: output and weights."""
    masks = {name: arguments[name] for name in ("key_mask", "mask", "causal")}
    allowed = merge_masks(q.shape[2], k.shape[2], **masks)
    pattern = kernel.pattern(q.shape[2], k.shape[2])
    if pattern is not None:
        allowed = pattern if allowed is None else allowed & pattern
    return softmax_attention(q, k, v, allowed=allowed, bias=arguments["bias"], scale=arguments["scale"])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}: {title}")
        for name in EXACT
        for title, case in CASES.items()
        if case.needs <= kernel_class(name).supports
    ],
)
def test_equals_naive(name: str, case: Case) -> None:
    """Output and gradients in fp32; the output in bf16, where 8 bits of mantissa bound what can be asked."""
    kernel, (q, k, v), arguments = build(name), case.tensors(), case.arguments()
    leaves = [t for t in (q, k, v, arguments["bias"]) if t is not None]
    expected = naive(kernel, q, k, v, arguments)[0]
    actual = kernel(q, k, v, **arguments)
    assert_close(actual, expected)
    gradient = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(actual, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        assert_close(mine, theirs)

    half = kernel(*(t.bfloat16() for t in (q, k, v)), **arguments)
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() < 0.03 * expected.abs().max()


def test_grouped_heads_share_keys() -> None:
    """Query head h reads key head h // (H / G), against a loop over heads."""
    q, k, v = Case(kv_heads=2).tensors()
    out = build("naive")(q, k, v, scale=1.0)
    for h in range(4):
        weights = (q[:, h] @ k[:, h // 2].transpose(1, 2)).softmax(-1)
        assert_close(out[:, h], weights @ v[:, h // 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "what"),
    [(name, what) for what in ("key_mask", "mask", "mask, bias") for name in supporting(*what.split(", "))],
)
def test_query_without_keys(name: str, what: str, dtype: torch.dtype) -> None:
    """A fully masked row gives zeros, and its gradients are finite and zero."""
    case = Case(key_mask=what == "key_mask", mask="mask" in what.split(", "), bias="bias" in what)
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in case.tensors())
    arguments = case.arguments()
    row = (1, slice(None), slice(None)) if what == "key_mask" else (1, slice(None), 4)
    if what == "key_mask":
        arguments["key_mask"][1] = False
    else:
        arguments["mask"][1, :, 4] = False
    out = build(name)(q, k, v, **arguments)
    out.sum().backward()
    assert (out[row] == 0).all()
    assert out[0].abs().min() > 0
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert (q.grad[row] == 0).all()


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}: {title}")
        for title, case in CASES.items()
        if case.causal and case.queries > 1
        for name in supporting(*case.needs)
    ],
)
def test_no_causal_leak(name: str, case: Case) -> None:
    """By gradient: query i depends on the keys and values up to i + Nk - Nq, and on no later one."""
    kernel, (q, k, v), arguments = build(name), case.tensors(), case.arguments()
    out = kernel(q, k, v, **arguments)
    for i in range(case.queries):
        for gradient in torch.autograd.grad(out[:, :, i].sum(), (k, v), retain_graph=True):
            reached = gradient.abs().sum((0, 1, 3))
            assert (reached[i + case.keys - case.queries + 1 :] == 0).all()
            assert i == 0 or reached.any()


@pytest.mark.parametrize("causal", [False, True])
def test_local_window(causal: bool) -> None:
    """By gradient: a token sees the three on either side, or the three before it, and none else."""
    q, k, v = Case(queries=12, keys=12).tensors()
    out = build("local")(q, k, v, causal=causal, scale=1.0)
    for i in range(12):
        (gradient,) = torch.autograd.grad(out[:, :, i].sum(), v, retain_graph=True)
        seen = gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
        assert seen == list(range(max(0, i - 3), i + 1 if causal else min(12, i + 4)))


def test_causal_mask_is_bottom_right_aligned() -> None:
    assert causal_mask(2, 4).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert causal_mask(3, 3).equal(torch.ones(3, 3, dtype=torch.bool).tril())


@pytest.mark.parametrize("name", supporting("dropout"))
def test_dropout(name: str) -> None:
    """Only in training, and it keeps the mean: with values of one, an output is the sum of the weights left."""
    q, k, _ = Case(queries=64, keys=64).tensors()
    v = torch.ones_like(k)
    kernel = build(name, dropout=0.5)
    assert_close(kernel.eval()(q, k, v, scale=0.1), v)
    out = kernel.train()(q, k, v, scale=0.1)
    assert out.std() > 0.05
    assert abs(out.mean() - 1) < 0.05


@pytest.mark.parametrize("dim", [64, 1024])
def test_variance_of_scores(dim: int) -> None:
    """For independent q, k of unit variance q·k has variance d_k, so 1/√d_k keeps the softmax from saturating."""
    q, k = torch.randn(2, 1, 1, 256, dim)
    scores = q @ k.transpose(-2, -1)
    assert abs(scores.var() / dim - 1) < 0.05
    largest = {scale: softmax_attention(q, k, k, scale=scale)[1].amax(-1).mean() for scale in (1.0, dim**-0.5)}
    assert largest[dim**-0.5] < 0.1
    assert largest[1.0] > 0.7


def test_auto_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "PLAIN_UP_TO", {("cpu", torch.float32): 11})
    kernel, called = auto.AutoKernel(), []
    kernel.plain.register_forward_hook(lambda *_: called.append("plain"))
    kernel.fused.register_forward_hook(lambda *_: called.append("fused"))
    kernel(*Case(keys=11).tensors(), scale=1.0)
    kernel(*Case(keys=12).tensors(), scale=1.0)
    kernel(*(t.detach() for t in Case(keys=11).tensors()), scale=1.0)
    kernel(*(t.double() for t in Case(keys=11).tensors()), scale=1.0)
    assert called == ["plain", "fused", "fused", "fused"]


@pytest.fixture
def poor_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kernel added as one file, which supports nothing but plain self-attention."""
    (tmp_path / "mean_pool.py").write_text(
        "from multimodal.attention.kernels.base import Kernel\n\n\n"
        "class MeanPoolKernel(Kernel):\n"
        "    supports = frozenset()\n\n"
        "    def __init__(self, *, share: float = 1.0, dropout: float = 0.0) -> None:\n"
        "        super().__init__(dropout=dropout)\n"
        "        self.share = share\n\n"
        "    def forward(self, q, k, v, *, key_mask=None, mask=None, bias=None, causal=False, scale):\n"
        "        return self.share * v.mean(2, keepdim=True).expand_as(q)\n"
    )
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    kernel_names.cache_clear()
    yield "mean_pool"
    kernel_names.cache_clear()
    sys.modules.pop(f"{kernels.__name__}.mean_pool", None)


def test_a_file_is_a_kernel(poor_kernel: str) -> None:
    """Found by its file name, for every layer or one of them, with its own options."""
    assert poor_kernel in kernel_names()
    config = StackConfig(
        embed_dim=8, depth=2, num_heads=2, attention=("sdpa", poor_kernel), attention_options={"share": 0}
    )
    stack = Stack(config)
    assert stack.blocks[1].self_attn.kernel.share == 0
    assert stack(torch.randn(2, 5, 8), need_layers=[1]).last.shape == (2, 5, 8)


@pytest.mark.parametrize(
    ("needs", "build_stack"),
    [
        ("causal", lambda config: Stack(config, causal=True)),
        ("cross", lambda config: Stack(config, context_dim=8)),
        ("dropout", lambda config: Stack(StackConfig(**{**vars(config), "attention_dropout": 0.1}))),
        ("cache", lambda config: Stack(config).make_cache(5)),
        ("weights", lambda config: Stack(config)(torch.zeros(1, 3, 8), need_weights=[0])),
        ("key_mask", lambda config: Stack(config)(torch.zeros(1, 3, 8), key_mask=torch.ones(1, 3, dtype=torch.bool))),
        ("bias", lambda config: Stack(config)(torch.zeros(1, 3, 8), bias=torch.zeros(1, 1, 3, 3))),
    ],
)
def test_unsupported_pair(poor_kernel: str, needs: str, build_stack: Any) -> None:
    """It fails, by both names, and when the model is built wherever that is known then."""
    config = StackConfig(embed_dim=8, depth=1, num_heads=2, attention=poor_kernel)
    with pytest.raises(ValueError, match=f"'{poor_kernel}' does not support '{needs}'"):
        build_stack(config)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdap", {}, "no kernel 'sdap'; did you mean 'sdpa'"),
        ("zzz", {}, "no kernel 'zzz', expected one of auto, local"),
        ("local", {"windw": 3}, "kernel local has no option 'windw'; did you mean 'window'"),
        ("sdpa", {"window": 3}, "kernel sdpa has no option 'window', nor any other"),
        ("local", {"window": "3"}, "window of kernel 'local' is '3', expected int"),
        ("local", {"window": True}, "window of kernel 'local' is True, expected int"),
        ("local", {"window": 0}, "window is 0, expected at least 1"),
    ],
)
def test_wrong_name_or_option(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(8, 2, kernel=name, kernel_options=options)
    with pytest.raises(ValueError, match=message):
        Stack(StackConfig(embed_dim=8, depth=1, num_heads=2, attention=name, attention_options=options))
