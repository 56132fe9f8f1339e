"""Attention kernels: one file a kernel. `NAME.py` holds the class `NameKernel`, and its file name is its name."""

import inspect
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

from multimodal.attention.kernels.base import Kernel

__all__ = ["Kernel", "build_kernel", "kernel_class", "kernel_names", "split_options"]


@cache
def kernel_names() -> tuple[str, ...]:
    """Names of the kernels, from the files in this folder."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"))


def _nearest(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f", expected one of {', '.join(names)}" if names else ", nor any other"


def kernel_class(name: str) -> type[Kernel]:
    """The kernel class of that name; ValueError naming the nearest one where there is none."""
    if name not in kernel_names():
        raise ValueError(f"attention: no kernel {name!r}{_nearest(name, kernel_names())}")
    module = import_module(f"{__name__}.{name}")
    return getattr(module, f"{name.title().replace('_', '')}Kernel")


def _option_types(name: str) -> dict[str, type]:
    parameters = inspect.signature(kernel_class(name)).parameters
    return {key: p.annotation for key, p in parameters.items() if key != "dropout"}


def split_options(names: Collection[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each of these kernels; ValueError for one that none of them has."""
    known = {name: _option_types(name) for name in names}
    for key in options:
        if not any(key in types for types in known.values()):
            everyone = sorted({key for types in known.values() for key in types})
            owners = "/".join(sorted(known))
            raise ValueError(f"attention_options: kernel {owners} has no option {key!r}{_nearest(key, everyone)}")
    return {name: {key: value for key, value in options.items() if key in known[name]} for name in names}


def build_kernel(name: str, options: Mapping[str, Any] | None = None, *, dropout: float = 0.0) -> Kernel:
    """A kernel from its name and its own options, which are checked by name and type."""
    own = split_options([name], options or {})[name]
    for key, expected in _option_types(name).items():
        value = own.get(key)
        if key in own and type(value) is not expected and not (expected is float and type(value) is int):
            raise ValueError(f"attention_options: {key} of kernel {name!r} is {value!r}, expected {expected.__name__}")
    return kernel_class(name)(dropout=dropout, **own)
