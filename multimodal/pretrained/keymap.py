"""The machine that renames weights: one table of rules a source, read in both directions.

A rule says which of their tensors are which of ours and what is done in between:

    Rule("blocks.*.attn.qkv.*", tuple(f"encoder.blocks.*.self_attn.{x}_proj.*" for x in "qkv"), (Split(3),))

`*` stands for one component of a name, in the same order on both sides. Every operation can be undone exactly, so that
importing and exporting again gives the same bits. What a table covers is known from our side: the model's own state
dict, read backwards through the table, says which of their keys must be there, in which shapes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class Op(Protocol):
    """A step between their tensors and ours that can be undone exactly."""

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]: ...

    def to_theirs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Split:
    """One of theirs is several of ours, along `dim`: equal parts, or parts of the given sizes."""

    parts: int | tuple[int, ...]
    dim: int = 0

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        return fused.chunk(self.parts, self.dim) if isinstance(self.parts, int) else fused.split(self.parts, self.dim)

    def to_theirs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(tensors), self.dim)]


@dataclass(frozen=True)
class Join:
    """Several of theirs, of the given sizes along `dim`, are one of ours."""

    sizes: tuple[int, ...]
    dim: int = 0

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return Split(self.sizes, self.dim).to_theirs(tensors)

    def to_theirs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return Split(self.sizes, self.dim).to_ours(tensors)


@dataclass(frozen=True)
class Reshape:
    """The same numbers in another shape; one size a side may be -1."""

    theirs: tuple[int, ...]
    ours: tuple[int, ...]

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.reshape(self.ours) for tensor in tensors]

    def to_theirs(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.reshape(self.theirs) for tensor in tensors]


@dataclass(frozen=True)
class Transpose:
    """Matrices stored [in, out] (GPT-2's Conv1D, CLIP's `proj`), which are [out, in] here; vectors stay."""

    def to_ours(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.T if tensor.dim() == 2 else tensor for tensor in tensors]

    to_theirs = to_ours


@dataclass(frozen=True)
class Rule:
    """Names on both sides, and the operations that lead from theirs to ours, in this order."""

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    ops: tuple[Op, ...] = ()


class _Step(NamedTuple):
    """A rule applied to concrete names."""

    theirs: list[str]
    ours: list[str]
    ops: tuple[Op, ...]


def _names(side: str | tuple[str, ...]) -> tuple[str, ...]:
    return (side,) if isinstance(side, str) else side


def _fill(pattern: str, parts: Sequence[str]) -> str:
    for part in parts:
        pattern = pattern.replace("*", part, 1)
    return pattern


def _steps(rules: Sequence[Rule], keys: Sequence[str]) -> list[_Step]:
    """The rules applied to our keys; ValueError unless the table is a bijection over them."""
    steps = []
    for rule in rules:
        first = _names(rule.ours)[0]
        expression = re.compile(re.escape(first).replace(r"\*", r"([^.]+)"))
        for key in keys:
            match = expression.fullmatch(key)
            if match:
                theirs, ours = ([_fill(name, match.groups()) for name in _names(s)] for s in (rule.theirs, rule.ours))
                steps.append(_Step(theirs, ours, rule.ops))
    claimed = Counter(key for step in steps for key in step.ours)
    made = Counter(key for step in steps for key in step.theirs)
    uncovered = claimed.keys() ^ set(keys)
    twice = {key for key, count in [*claimed.items(), *made.items()] if count > 1}
    if uncovered or twice:
        raise ValueError(f"key table: not covered {sorted(uncovered)}, claimed twice {sorted(twice)}")
    return steps


def check_keys(found: State, expected: State, where: str) -> None:
    """ValueError that lists all missing, unknown and mis-shaped keys; `where` says whose keys they are."""
    misshaped = [
        f"{key} {list(found[key].shape)} (expected {list(expected[key].shape)})"
        for key in sorted(found.keys() & expected.keys())
        if found[key].shape != expected[key].shape
    ]
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys()),
        "mis-shaped": misshaped,
    }
    problems = [f"{kind} {', '.join(keys)}" for kind, keys in kinds.items() if keys]
    if problems:
        raise ValueError(f"{where}: the weights do not fit the model: {'; '.join(problems)}")


class KeyMap:
    """A table applied to one model.

    Args:
        rules: the table.
        ours: the model's own state dict, of which names and shapes are read (tensors on the meta device do).
    """

    def __init__(self, rules: Sequence[Rule], ours: State) -> None:
        self.ours = ours
        self._steps = _steps(rules, list(ours))
        self.theirs = self._convert_to_theirs(ours)

    def _convert_to_theirs(self, state: State) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for step in self._steps:
            tensors: Sequence[Tensor] = [state[key] for key in step.ours]
            for op in reversed(step.ops):
                tensors = op.to_theirs(tensors)
            converted.update(zip(step.theirs, map(_own, tensors), strict=True))
        return converted

    def to_theirs(self, state: State, where: str) -> dict[str, Tensor]:
        """Our weights under their names; the result shares no memory with `state`. ValueError as `check_keys`."""
        check_keys(state, self.ours, where)
        return self._convert_to_theirs(state)

    def to_ours(self, state: State, where: str) -> dict[str, Tensor]:
        """Their weights under our names; the result shares no memory with `state`. ValueError as `check_keys`."""
        check_keys(state, self.theirs, where)
        converted: dict[str, Tensor] = {}
        for step in self._steps:
            tensors: Sequence[Tensor] = [state[key] for key in step.theirs]
            for op in step.ops:
                tensors = op.to_ours(tensors)
            converted.update(zip(step.ours, map(_own, tensors), strict=True))
        return {key: converted[key] for key in self.ours}


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy: the parts of a fused matrix do not keep it alive, and can be saved one by one."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
