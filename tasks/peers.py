"""What the published implementations of several tasks need: our weights in their modules, and the forms they run in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from multimodal.models import model_classes
from multimodal.pretrained import Checkpoint
from tasks.workload import Data, Peer, Setting, Subject, Workload, ready

Attention = Literal["fused", "plain"]
HF_ATTENTION: Mapping[Attention, str] = {"fused": "sdpa", "plain": "eager"}
"""What Hugging Face calls them."""
_written: dict[tuple[str, str, object], TemporaryDirectory[str]] = {}
"""Exports of the latest model, by task, config and who wrote them: one serves all forms and works of that model."""


def exported(
    task: str,
    config: Any,
    write: Callable[[Checkpoint, Path], Any],
    read: Callable[[Path], Any],
    *,
    suffix: str = "",
    tokenizer: Any = None,
) -> Any:
    """A published implementation with the weights of a fresh model of ours: an export of ours, opened by them.

    Args:
        task: whose model it is.
        config: the model's config.
        write: of `multimodal.pretrained`: writes a checkpoint as a file or folder of theirs.
        read: opens that, which may be read again.
        suffix: how the name of the file ends.
        tokenizer: that of the checkpoint.

    Raises:
        ValueError: the model has something that theirs has not.
    """
    key = task, repr(config), write
    if any(other[:2] != key[:2] for other in _written):
        forget_exports()
    if key not in _written:
        folder = TemporaryDirectory(prefix="multimodal-")
        checkpoint = Checkpoint.of(task, model_classes(task)[0](config), tokenizer=tokenizer)
        write(checkpoint, Path(folder.name, f"peer{suffix}"))
        _written[key] = folder
    return read(Path(_written[key].name, f"peer{suffix}"))


def forget_exports() -> None:
    """Remove what `exported` keeps until another model comes, or the process ends as Python does by itself."""
    while _written:
        _written.popitem()[1].cleanup()


def from_pretrained(model: Any, folder: Path, attention: Attention) -> Any:
    """A class of transformers', opened from a folder with that attention, without a word about it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return model.from_pretrained(folder, attn_implementation=HF_ATTENTION[attention])


def cast(data: Data, dtype: torch.dtype) -> dict[str, Any]:
    """The data with its floating-point tensors in `dtype`."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in data.items()
    }


def peer(
    name: str,
    package: str,
    work: Workload,
    setting: Setting,
    make: Callable[[Attention], nn.Module],
    run: Callable[[Any, Data], Any],
    attention: Sequence[Attention] = ("fused", "plain"),
    told: str = "",
    prepare: Callable[[Data], Data] = dict,
    called: Sequence[str] = ("",),
    compiled: str = "compiled",
) -> Peer:
    """A module of a package, with fused and with plain attention; with one of them also compiled where that is asked.

    Args:
        name, package: see `Peer`.
        work, setting: what is measured.
        make: builds the module for an attention.
        run: does the work once with the module, or with it compiled, and the data; in training it returns the loss.
        attention: which ones the module has.
        told: what else there is to say of its forms.
        prepare: makes of the data what the module is fed; not measured.
        called: the submodules or methods that `run` calls, "" = the module itself: what is to be compiled.
        compiled: what is said of the form in which they are.
    """
    # Plain attention loses on a GPU; on a CPU it wins in bfloat16 with gradients (docs/attention_kernels.md).
    kinds = attention if setting.device.type == "cpu" else attention[:1]
    if setting.compile:
        kinds = kinds[-1:] if work.trains and setting.dtype == torch.bfloat16 else kinds[:1]

    def form(kind: Attention, compiles: bool, data: Data) -> Subject:
        model = ready(make(kind), replace(setting, compile=False), trains=work.trains)
        if compiles:
            # Weights that stay are folded and laid out by the compiler where it may.
            frozen = {"freezing": True} if setting.device.type == "cpu" and not work.trains else None
            for part in called:
                _compile(model, part, frozen)
        inputs = prepare(data if work.trains else cast(data, setting.dtype))
        return Subject(run=lambda: run(model, inputs), model=model)

    ways = [(kind, False) for kind in kinds] + ([(kind, True) for kind in kinds] if setting.compile else [])
    forms = {
        ", ".join(word for word in (kind, told, compiled * compiles) if word): partial(form, kind, compiles)
        for kind, compiles in ways
    }
    return Peer(name=name, package=package, forms=forms)


def _compile(model: nn.Module, called: str, options: dict[str, Any] | None) -> None:
    """In place, the module or what is called in place of it."""
    owner, _, name = called.rpartition(".")
    part = getattr(model.get_submodule(owner), name) if name else model
    if isinstance(part, nn.Module):
        part.compile(options=options)
    else:
        setattr(model.get_submodule(owner), name, torch.compile(part, options=options))


def plain(model: nn.Module) -> nn.Module:
    """The module, in which `scaled_dot_product_attention` is computed step by step from now on."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.forward = _within_math(module.forward)  # type: ignore[method-assign]
    return model


def _within_math(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return call(*args, **options)

    return run
