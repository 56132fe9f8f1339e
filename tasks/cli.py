"""The `multimodal` command: `multimodal VERB TASK [flags]`, without the task for a verb that means one task alone.

This file imports the standard library alone, so that help, the list of tasks and a mistyped word are answered at once;
torch and Lightning are imported when a task runs.
"""

import argparse
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import NoReturn

from tasks import registry
from tasks.errors import UsageError, did_you_mean, one_line
from tasks.processes import end_with_parent
from tasks.registry import DISTRIBUTION, Task

TRAINER_VERBS = {
    "fit": "train a task, then test its best checkpoint",
    "validate": "measure a checkpoint on the validation split",
    "test": "measure a checkpoint on the test split",
}
DEBUG = "MULTIMODAL_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 done, 1 failed, 2 mistyped, 128 + n stopped by signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SystemExit as stop:  # argparse after --help, Lightning after Ctrl-C
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get(DEBUG):
            raise
        print(f"multimodal: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _run(arguments: list[str]) -> int:
    _, problems = registry.discover()
    for problem in problems:
        print(f"multimodal: warning: {problem}", file=sys.stderr)
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help"):
        print(_overview())
        return 0
    if verb == "--version":
        print(f"multimodal {_version()}")
        return 0
    if verb == "tasks":
        return _list_tasks(rest)
    verbs = _verbs()
    if verb in _across():
        return _run_across(verb, rest)
    if verb not in verbs:
        raise UsageError(f"unknown verb {verb!r}: {did_you_mean(verb, [*verbs, *_across(), 'tasks'])}")
    if (owner := _owner(verb)) is not None:
        return _run_other(verb, owner, rest)
    if not rest or rest[0] in ("-h", "--help"):
        print(_about(verb, verbs[verb]))
        return 0 if rest else 2
    try:
        task = registry.get(rest[0])
    except ValueError as error:
        raise UsageError(str(error)) from None
    if verb in TRAINER_VERBS:
        end_with_parent()
        from tasks.trainer_cli import run

        return run(verb, task, rest[1:])
    return _run_other(verb, task, rest[1:])


def _verbs() -> dict[str, str]:
    """All verbs that take a task, with their help."""
    tasks, _ = registry.discover()
    others = (*registry.VERBS, *(verb for task in tasks.values() for verb in task.verbs))
    return TRAINER_VERBS | {verb.name: verb.help for verb in others}


def _across() -> dict[str, registry.Verb]:
    """The verbs that are told to several tasks at once."""
    return {verb.name: verb for verb in registry.ACROSS}


def _owner(name: str) -> Task | None:
    """The task of a verb that is typed without it."""
    tasks, _ = registry.discover()
    alone = (task for task in tasks.values() for verb in task.verbs if verb.name == name and not verb.names_task)
    return next(alone, None)


def _tasks_with(verb: str) -> dict[str, str]:
    tasks, _ = registry.discover()
    return {task.name: task.help for task in tasks.values() if verb in _task_verbs(task)}


def _run_across(name: str, arguments: list[str]) -> int:
    verb = _across()[name]
    module = importlib.import_module(verb.module)
    parser = Parser(prog=f"multimodal {name}", description=verb.help)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def _run_other(name: str, task: Task, arguments: list[str]) -> int:
    verb = next((verb for verb in (*registry.VERBS, *task.verbs) if verb.name == name), None)
    if verb is None:
        raise UsageError(f"task {task.name!r} has no verb {name!r}: {did_you_mean(task.name, _tasks_with(name))}")
    module = task.load(verb.module)
    words = ["multimodal", name, *([task.name] if verb.names_task else [])]
    parser = Parser(prog=" ".join(words), description=verb.help)
    parser.set_defaults(task=task)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line; takes no abbreviated flag."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse; a mistyped flag is told before one that is therefore missing. Flags may stand between other words."""
        known = {flag for action in self._actions for flag in action.option_strings}
        for argument in itertools.takewhile(lambda argument: argument != "--", args):
            flag = argument.split("=")[0]
            if re.match(r"-[^\d.]", flag) and flag not in known:  # others are negative numbers
                raise UsageError(f"unknown flag {flag}: {did_you_mean(flag, known)}")
        return super().parse_intermixed_args(args)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _list_tasks(arguments: list[str]) -> int:
    parser = Parser(prog="multimodal tasks", description="list the tasks")
    parser.add_argument("--json", action="store_true", help="the whole registry as JSON")
    tasks, _ = registry.discover()
    if parser.parse_args(arguments).json:
        print(json.dumps([asdict(task) for task in tasks.values()], indent=2))
        return 0
    header = ("task", "what it does", "metric", "verbs", "extra")
    rows = [
        (task.name, task.help, f"{task.metric} ({task.mode})", " ".join(_task_verbs(task)), task.extra or "")
        for task in tasks.values()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _task_verbs(task: Task) -> list[str]:
    return [*TRAINER_VERBS, *(verb.name for verb in (*registry.VERBS, *task.verbs))]


def _about(verb: str, text: str) -> str:
    """Help of a verb whose task is still to be named."""
    parts = [f"usage: multimodal {verb} TASK [flags]", text, _table(_tasks_with(verb))]
    return "\n\n".join([*parts, _formats()] if verb == "export" else parts)


def _formats() -> str:
    tasks, _ = registry.discover()
    return "export formats:\n" + _table(
        {task.name: ", ".join(one.name for one in task.formats) for task in tasks.values()}
    )


def _overview() -> str:
    tasks, _ = registry.discover()
    verbs = {"tasks [--json]": "list the tasks"} | {
        verb if _owner(verb) else f"{verb} TASK": text for verb, text in _verbs().items()
    }
    verbs |= {f"{verb} [TASK...]": one.help for verb, one in _across().items()}
    return "\n\n".join(
        (
            "usage: multimodal VERB TASK [flags]",
            "verbs:\n" + _table(verbs),
            "tasks:\n" + _table({task.name: task.help for task in tasks.values()}),
            _formats(),
            "multimodal VERB TASK --help lists the flags. multimodal --version prints the version.",
        )
    )


def _table(rows: dict[str, str]) -> str:
    width = max((len(name) for name in rows), default=0)
    return "\n".join(f"  {name.ljust(width)}  {text}" for name, text in rows.items())


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
