"""Which tasks there are. Standard library only, so that the command line answers without importing torch.

A task is a folder of this package whose `__init__.py` defines `TASK`, or an entry point of another distribution in the
group `multimodal.tasks` that names such a `Task`.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import tasks
from tasks.errors import did_you_mean, one_line

DISTRIBUTION = "multimodal-transformer-suite"
ENTRY_POINTS = "multimodal.tasks"


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command that a task adds: `multimodal NAME TASK ...`, or `multimodal NAME ...` where no other task has it."""

    name: str
    """What is typed."""
    help: str
    """One line of help."""
    module: str
    """A module with `add_arguments(parser)` and `run(args) -> int`, the exit code; `task` is the parser's default."""
    names_task: bool = True
    """Whether the task is typed; false for a word that means this task alone (`transcribe`)."""


VERBS = (Verb(name="export", help="write a checkpoint in another format", module="tasks.export"),)
"""What every task can be told, beside training and measuring."""
ACROSS = (Verb(name="benchmark", help="measure the speed of tasks side by side", module="tasks.benchmark"),)
"""What is told to several tasks at once: names of tasks are among the arguments of the verb."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """An option that follows from another one, as in jsonargparse's `link_arguments`."""

    source: str
    """Where the value comes from: an option, or an attribute of what was built."""
    target: str
    """The option that it sets, which is then no flag."""
    on: Literal["parse", "instantiate"] = "parse"
    """`instantiate` where the source is known only once it is built."""


class Example(NamedTuple):
    """What a model is fed and what it answers: how exports and benchmarks run a model of any task."""

    inputs: dict[str, Any]
    """Random tensors [B, ...] by their names in a batch, in the order in which the model takes them."""
    outputs: tuple[str, ...]
    """Names of the tensors that the model returns, in their order: [B, ...], or scalars of the model's own."""
    free: Mapping[str, Mapping[int, tuple[str, int]]] = MappingProxyType({})
    """For an input, its axes that may have other lengths: a name, and the least length. The first one is free anyway,
    but the same for all inputs unless it is named here."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a checkpoint can be written as: `multimodal export TASK --to NAME OUT`. Functions are "module:name"."""

    name: str
    """What is typed."""
    help: str
    """One line of help."""
    write: str
    """`write(checkpoint, out)` writes the file or folder `out`, which does not exist yet."""
    open: str = "tasks.formats:open_weights"
    """`open(out)` reads it again, as a function of the model's inputs that returns a tuple of outputs."""
    suffix: str | None = None
    """How the name of the file ends; None = a folder."""
    extra: str | None = None
    """The pip extra that the format needs."""

    def load(self, target: str) -> Any:
        """Import `write` or `open`; ValueError where the extra is not installed."""
        return _load(target, f"--to {self.name}", self.extra)


FORMATS = (
    Format(
        name="safetensors",
        help="one file of this suite's, for --checkpoint and --init",
        write="tasks.formats:write_safetensors",
        suffix=".safetensors",
    ),
    Format(
        name="onnx",
        help="an ONNX graph for any batch size",
        write="tasks.formats_onnx:write_onnx",
        open="tasks.formats_onnx:open_onnx",
        suffix=".onnx",
        extra="export",
    ),
    Format(
        name="torch-export",
        help="a torch.export program for any batch size",
        write="tasks.formats:write_program",
        open="tasks.formats:open_program",
        suffix=".pt2",
    ),
)
"""What every task can be exported to."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the frame knows about a task. Classes and functions are "module:name" strings, imported when needed."""

    name: str
    """What is typed, and the name of the folder."""
    help: str
    """One line of help."""
    module: str
    """The LightningModule, a `tasks.base:TaskModule`."""
    data: str
    """The LightningDataModule."""
    config: str
    """The default recipe: a file of `configs/`, or "package:path" in another distribution."""
    metric: str
    """The main metric: logged as `val/METRIC`, which picks the best checkpoint, and as `test/METRIC`."""
    mode: Literal["max", "min"]
    """Whether more or less of the metric is better."""
    example: str
    """How the model is fed: a function `(config, batch_size) -> Example`, for the model's config dataclass."""
    links: tuple[Link, ...] = ()
    """Options that follow from other options."""
    verbs: tuple[Verb, ...] = ()
    """Commands beyond those of the frame."""
    formats: tuple[Format, ...] = FORMATS
    """What its checkpoints can be exported to."""
    extra: str | None = None
    """The pip extra that the task needs."""
    benchmark: str | None = None
    """What is measured: a function `(size) -> list[Workload]`, see `tasks.workload`; None = it is not in benchmarks."""
    peers: str | None = None
    """Published implementations to measure beside: a function `(work, setting) -> list[Peer]`; None = there is none."""

    @property
    def config_path(self) -> Path:
        """Where the default recipe lies: in the wheel beside this file, in a checkout at the repository's root."""
        package, _, name = self.config.rpartition(":")
        here = Path(__file__).parent
        folders = [Path(str(resources.files(package)))] if package else [here / "configs", here.parent / "configs"]
        for folder in folders:
            if (folder / name).is_file():
                return folder / name
        raise FileNotFoundError(f"task {self.name!r}: its recipe {name} is not in {' nor in '.join(map(str, folders))}")

    def load(self, target: str) -> Any:
        """Import a "module:name" of this task, or a whole "module"; ValueError where its extra is not installed."""
        return _load(target, f"task {self.name!r}", self.extra)


def _load(target: str, owner: str, extra: str | None) -> Any:
    module, _, name = target.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if extra is None:
            raise
        raise ValueError(f"{owner} needs {error.name}: pip install '{DISTRIBUTION}[{extra}]'") from error
    return getattr(loaded, name) if name else loaded


@cache
def discover() -> tuple[dict[str, Task], list[str]]:
    """All tasks by name, and one line for each entry point of another distribution that could not be used."""
    found = {task.name: task for task in _own_tasks()}
    problems = []
    for entry in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        origin = f"task {entry.name!r} of {entry.dist.name if entry.dist else entry.value}"
        try:
            task = entry.load()
        except Exception as error:  # whatever another distribution does wrong, the other tasks stay usable
            problems.append(f"{origin} does not load: {type(error).__name__}: {one_line(error)}")
            continue
        if not isinstance(task, Task):
            problems.append(f"{origin} is not a tasks.registry.Task but a {type(task).__name__}")
        elif task.name in found:
            problems.append(f"{origin} is left out: there is a task {task.name!r} already")
        else:
            found[task.name] = task
    return dict(sorted(found.items())), problems


def _own_tasks() -> Iterator[Task]:
    for folder in pkgutil.iter_modules(tasks.__path__):
        if folder.ispkg:
            yield importlib.import_module(f"tasks.{folder.name}").TASK


def get(name: str) -> Task:
    """The task of that name; ValueError, with the nearest name, where there is none."""
    found, _ = discover()
    if name not in found:
        raise ValueError(f"unknown task {name!r}: {did_you_mean(name, found)}")
    return found[name]
