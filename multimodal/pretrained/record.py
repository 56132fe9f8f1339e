"""What a checkpoint says besides its weights, and the model that is built from it."""

import json
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from multimodal.blocks import StackConfig
from multimodal.models import model_classes
from multimodal.pretrained.keymap import check_keys

FORMAT = 1
"""Version of the record; a reader refuses a newer one."""


@dataclass(frozen=True)
class Checkpoint:
    """Weights under this suite's names, and all that is needed to use them: plain data."""

    task: str
    """The task whose model this is."""
    config: dict[str, Any]
    """Fields of the model's config."""
    preprocess: dict[str, Any] | None
    """What has to be done to an input: size, mean, std, …; None where that is not known."""
    labels: list[str] | None
    """Names of the classes; None where they are not known."""
    tokenizer: Any
    """The text side's tokenizer; None for a model without text."""
    state_dict: dict[str, Tensor]
    """The weights; averaged ones where a run kept both."""

    def record(self) -> dict[str, Any]:
        """All but the weights, as plain data: what files hold under the key `multimodal`."""
        record = {
            "format": FORMAT,
            "task": self.task,
            "config": self.config,
            "preprocess": self.preprocess,
            "labels": self.labels,
            "tokenizer": self.tokenizer,
        }
        plain: dict[str, Any] = json.loads(json.dumps(record))
        return plain

    @classmethod
    def from_record(cls, record: Any, state_dict: dict[str, Tensor], where: str) -> "Checkpoint":
        """The reverse of `record`; ValueError, beginning with `where`, for anything else."""
        if not isinstance(record, Mapping) or not isinstance(record.get("format"), int):
            raise ValueError(f"{where}: its record {record!r:.80} has no format number, expected {FORMAT}")
        if record["format"] > FORMAT:
            raise ValueError(f"{where}: format {record['format']}, expected at most {FORMAT}: update this package")
        names = ("task", "config", "preprocess", "labels", "tokenizer")
        values: dict[str, Any] = {name: record.get(name) for name in names}
        labels = values["labels"]
        for name, right, expected in (
            ("task", isinstance(values["task"], str), "a name"),
            ("config", isinstance(values["config"], dict), "fields by name"),
            ("preprocess", isinstance(values["preprocess"], dict | None), "fields by name, or none"),
            ("labels", labels is None or _all_text(labels), "a list of names, or none"),
        ):
            if not right:
                raise ValueError(f"{where}: its record has {name} {values[name]!r:.80}, expected {expected}")
        return cls(**values, state_dict=state_dict)

    @classmethod
    def of(
        cls,
        task: str,
        model: nn.Module,
        *,
        preprocess: dict[str, Any] | None = None,
        labels: list[str] | None = None,
        tokenizer: Any = None,
    ) -> "Checkpoint":
        """A model in memory as a checkpoint; the weights are shared with it."""
        config: Any = model.config
        state = {key: value.detach() for key, value in model.state_dict().items()}
        return cls(task, plain_config(config), preprocess, labels, tokenizer, state)


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


class Loaded(NamedTuple):
    """A model ready for use, and what belongs to it; see `Checkpoint`."""

    model: nn.Module
    task: str
    config: dict[str, Any]
    preprocess: dict[str, Any] | None
    labels: list[str] | None
    tokenizer: Any


def plain_config(config: Any) -> dict[str, Any]:
    """A config dataclass as plain data."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def structure(config: Any) -> dict[str, Any]:
    """The fields of a config that decide what a model computes, flat (`encoder.depth`), as plain data."""
    found: dict[str, Any] = {}
    for name, value in plain_config(config).items():
        inner = getattr(config, name)
        if is_dataclass(inner):
            found |= {f"{name}.{key}": part for key, part in structure(inner).items()}
        elif name not in config.TRAINING_ONLY:
            found[name] = value
    return found


def build_config(task: str, values: Mapping[str, Any], where: str = "config") -> Any:
    """The task's config dataclass from plain data; ValueError, beginning with `where`, names what does not fit."""
    try:
        return from_plain(model_classes(task)[1], values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def template(task: str, config: Any) -> dict[str, Tensor]:
    """Names and shapes of a model's weights: its state dict on the meta device."""
    with torch.device("meta"):
        return model_classes(task)[0](config).state_dict()


def load_weights(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load every weight; ValueError, beginning with `where`, that lists all keys which do not fit."""
    check_keys(state, model.state_dict(), where)
    model.load_state_dict(state)


def require(config: Any, allowed: Mapping[str, Collection[Any]], where: str) -> None:
    """ValueError unless each field has one of the values that a foreign format can express.

    A name may lead into a stack of the model: `encoder.norm_order`.
    """
    values = {name: attrgetter(name)(config) for name in allowed}
    wrong = [f"{name} {value!r}" for name, value in values.items() if value not in allowed[name]]
    for prefix, stack in _stacks(config).items():
        kernels = sorted(set(stack.attention_kernels) - {"auto", "naive", "sdpa"})
        wrong += [f"{prefix}attention {name!r}" for name in kernels]
    if wrong:
        raise ValueError(f"{where}: that format cannot express {', '.join(wrong)}")


# A stack that is a Transformer as most are published.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "norm": ("layer",),
    "gated": (False,),
    "qkv_bias": (True,),
    "key_bias": (True,),
    "out_bias": (True,),
    "mlp_bias": (True,),
    "qk_norm": (False,),
    "rope": (None,),
}


def plain_stack(stack: StackConfig, prefix: str, /, **others: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """What `require` is to allow for a stack without what few formats know; `others` differ from that, or come on top.

    The names of the stack's fields begin with `prefix`.
    """
    heads: dict[str, tuple[Any, ...]] = {
        "head_dim": (None, stack.embed_dim // stack.num_heads),
        "num_kv_heads": (None, stack.num_heads),
    }
    return {f"{prefix}{name}": values for name, values in (_PLAIN | heads | others).items()}


def _stacks(config: Any) -> dict[str, StackConfig]:
    """The stacks of a model, by what the names of their fields begin with."""
    if isinstance(config, StackConfig):
        return {"": config}
    values = {f"{field.name}.": getattr(config, field.name) for field in fields(config)}
    return {prefix: value for prefix, value in values.items() if isinstance(value, StackConfig)}


def from_plain(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass, with those within it, from plain data; ValueError names what does not fit."""
    hints = get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            raise ValueError(f"unknown field {name!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"missing field {', '.join(missing)}")
    return cls(**{name: _convert(name, value, hints[name]) for name, value in values.items()})


def _convert(name: str, value: Any, hint: Any) -> Any:
    """A plain value as the hinted type: lists become tuples where the hint says so."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or (origin is Literal and value in args):
        return value
    if origin in (Union, types.UnionType):
        for choice in args:
            try:
                return _convert(name, value, choice)
            except ValueError:
                continue
    elif is_dataclass(hint) and isinstance(value, Mapping):
        return from_plain(hint, value)  # type: ignore[arg-type]
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple(_convert(name, item, kind) for item, kind in zip(value, kinds, strict=True))
    elif origin in (list, dict) and isinstance(value, origin):
        return value
    elif hint is float and type(value) is int:
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{name} is {value!r:.80}, expected {_spell(hint)}")


def _spell(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
