"""Floating-point operations of a work, by torch's counter: 2 for a multiplication and an addition in a product.

Products, convolutions and attention are counted; norms, activations and the like are not. Causal attention counts as if
every token saw every other.
"""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tasks.timing import Runner


def _fused(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _fused_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kw: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _linear(x: Any, weight: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * int(weight[0]) * int(weight[1])


def _multi_head(query: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, tokens, width = query
    return 2 * batch * tokens * width * (4 * width + 2 * tokens)


# What torch's counter does not know: fused attention on CPU, `nn.MultiheadAttention` in evaluation, and the Linears of
# `multimodal.linear`.
_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _fused,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward,
    torch.ops.aten._native_multi_head_attention: _multi_head,
    torch.ops.mkldnn._linear_pointwise: _linear,
}


def flops_of(runner: Runner) -> int:
    """Of one call of the runner's subject; in training of the forward and the backward pass.

    A model that is not trained asks for no gradients afterwards: torch's counter stumbles over weights that do.
    """
    model = runner.subject.model
    if model is not None and not runner.work.trains:
        model.requires_grad_(False)
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter:
        if runner.work.trains:
            runner.loss().backward()
        else:
            with torch.inference_mode():
                runner.subject.run()
    if model is not None:
        model.zero_grad()
    return int(counter.get_total_flops())
