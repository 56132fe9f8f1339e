"""`multimodal benchmark [TASK...]`: every task in one table, with published implementations beside it."""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from multimodal.attention.kernels import kernel_class
from tasks import benchmark_json, registry
from tasks.benchmark_json import Report, Row
from tasks.benchmark_report import aligned, terminal, write_html, write_markdown
from tasks.benchmark_rows import Bench
from tasks.errors import UsageError, did_you_mean, one_line
from tasks.machine import PRECISIONS, describe, refused
from tasks.predict import check_output, device_of, positive
from tasks.registry import DISTRIBUTION, Task

SIZES = {"tiny": ["tiny"], "published": ["published"], "all": ["tiny", "published"]}
ROUNDS = 7
_VARYING = ("load", "matmul", "bandwidth")
"""Of a machine, what is different each time."""
_OUTPUTS = ("json", "markdown", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="what is measured (default: every task)")
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="tiny",
        help="the models: tiny, those of the default recipes; published ones, with random weights; or all "
        "(default: tiny)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, …; auto is an accelerator where there is one")
    parser.add_argument(
        "--precision",
        default=",".join(PRECISIONS),
        metavar="A,B",
        help=f"some of {', '.join(PRECISIONS)} (default: {','.join(PRECISIONS)})",
    )
    parser.add_argument("--compile", action="store_true", help="compile the models, and peers where they gain by it")
    parser.add_argument("--attention", metavar="NAME", help="attention kernel of our models (default: their own)")
    parser.add_argument(
        "--peers", action="store_true", help="measure published implementations beside, those that are installed"
    )
    parser.add_argument("--rounds", type=positive, default=ROUNDS, metavar="N", help=f"of each row (default: {ROUNDS})")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, see docs/benchmark_schema.md")
    parser.add_argument("--markdown", metavar="FILE", help="write tables there, and charts beside as NAME-….png")
    parser.add_argument("--html", metavar="FILE", help="write one page with tables and charts there")
    parser.add_argument(
        "--compare", nargs=2, metavar=("OLD", "NEW"), help="measure nothing: compare two files of --json"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or compare; 1 where something failed, 130 where Ctrl-C stopped it: what was measured is written."""
    if args.compare:
        return _compare(args)
    try:
        chosen, precisions = _tasks(args.tasks), _precisions(args.precision)
        places = {name: Path(place) for name in _OUTPUTS if (place := getattr(args, name)) is not None}
        _check_places(places)
        if args.attention is not None:
            kernel_class(args.attention)
        device = device_of(args.device)
        lacking = refused(device, precisions)
        precisions = [name for name in precisions if name not in lacking]
        if not precisions:
            told = "; ".join(f"{name}: {why}" for name, why in lacking.items())
            raise ValueError(f"--device {args.device}: it computes in none of --precision {args.precision} ({told})")
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    created = datetime.now(UTC).isoformat(timespec="seconds")
    for name, why in lacking.items():
        _say(f"precision {name} is skipped: {why}")
    _say("the machine's own peaks")
    bench = Bench(
        sizes=SIZES[args.size],
        precisions=precisions,
        peers=args.peers,
        rounds=args.rounds,
        device=device,
        compile=args.compile,
        attention=args.attention,
        machine=describe(device, precisions),
        say=_say,
        skipped={f"precision {name}": why for name, why in lacking.items()},
    )

    def report(rows: Sequence[Row], *, complete: bool) -> Report:
        return Report(
            created=created,
            command=f"multimodal benchmark {shlex.join(_typed(args))}".rstrip(),
            complete=complete,
            rounds=args.rounds,
            machine=bench.machine,
            packages={DISTRIBUTION: _version()} | dict(sorted(bench.packages.items())),
            skipped=tuple(f"{name}: {why}" for name, why in bench.skipped.items()),
            rows=tuple(rows),
        )

    return _measure(bench, chosen, places, report)


def _measure(bench: Bench, chosen: Sequence[Task], places: dict[str, Path], report: Callable[..., Report]) -> int:
    """All rows; the JSON file grows with them. Where a file cannot be written after all, the table is printed."""
    rows: list[Row] = []
    complete = False
    try:
        try:
            for row in bench.rows(chosen):
                rows.append(row)
                if "json" in places:
                    benchmark_json.write(places["json"], report(rows, complete=False))
            complete = True
        except KeyboardInterrupt:
            _say(f"stopped; {len(rows)} rows are measured")
        _write(places, report(rows, complete=complete))
    finally:
        print(terminal(report(rows, complete=complete)))
    if not complete:
        return 130
    return 1 if any(row.errors for row in rows) else 0


def _write(places: dict[str, Path], report: Report) -> None:
    if "json" in places:
        benchmark_json.write(places["json"], report)
    if places.keys() & {"markdown", "html"}:
        from tasks.benchmark_charts import draw  # matplotlib takes a second

        charts = draw(report)
        if "markdown" in places:
            write_markdown(places["markdown"], report, charts)
        if "html" in places:
            write_html(places["html"], report, charts)


def _compare(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    if vars(args) != vars(parser.parse_args(["--compare", *args.compare])):
        raise UsageError("--compare OLD NEW: measures nothing, expected no other argument")
    try:
        old, new = (benchmark_json.read(Path(place)) for place in args.compare)
    except ValueError as error:
        raise UsageError(one_line(error)) from error
    print(aligned(benchmark_json.compare(old, new)))
    told = [{**asdict(one.machine), **one.packages} for one in (old, new)]
    for name in told[0] | told[1]:
        before, after = (one.get(name) for one in told)
        if before != after and name not in _VARYING:
            print(f"{name}: {before} in {args.compare[0]}, {after} in {args.compare[1]}")
    return 0


# ------------------------------------------------------------------------------------------------------- the arguments


def _tasks(names: Sequence[str]) -> list[Task]:
    found, _ = registry.discover()
    measured = {name: task for name, task in found.items() if task.benchmark is not None}
    for name in names:
        if name in found and name not in measured:
            raise ValueError(f"task {name!r} has no benchmark, expected some of {', '.join(measured)}")
        if name not in measured:
            raise ValueError(f"unknown task {name!r}: {did_you_mean(name, measured)}")
    return [task for name, task in measured.items() if not names or name in names]


def _precisions(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PRECISIONS:
            raise ValueError(f"--precision {text}: unknown {name!r}, {did_you_mean(name, PRECISIONS)}")
    return list(dict.fromkeys(names))


def _check_places(places: dict[str, Path]) -> None:
    """Told before anything is measured."""
    seen: dict[Path, str] = {}
    for name, place in places.items():
        check_output(f"--{name}", str(place))
        if place.exists() and not place.is_file():  # it would be replaced
            raise ValueError(f"--{name} {place}: no file, expected one, or none yet")
        first = seen.setdefault(place.resolve(), name)
        if first != name:
            raise ValueError(f"--{first} and --{name} are both {place}, expected two files")
        try:
            with tempfile.TemporaryFile(dir=place.parent):
                pass
        except OSError as error:
            raise ValueError(f"--{name} {place}: nothing can be written there ({error.strerror})") from error


def _typed(args: argparse.Namespace) -> list[str]:
    """The command line that makes these arguments."""
    words = [*args.tasks, "--size", args.size, "--device", args.device, "--precision", args.precision]
    words += [f"--{name}" for name in ("compile", "peers") if getattr(args, name)]
    words += ["--rounds", str(args.rounds)]
    for name in ("attention", *_OUTPUTS):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    return words


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "(not installed)"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
