"""Benchmarks as data: what is measured of whom, and the JSON file that holds it (docs/benchmark_schema.md)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from multimodal.pretrained.files import one_line, write_whole
from multimodal.pretrained.record import from_plain
from tasks.machine import Machine

KIND, VERSION = "multimodal-benchmark", 1
OURS = "ours"
"""The name of the entry that the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one of those does who do a work. What is None could not be had, or does not apply."""

    name: str
    """`OURS`, or the peer's."""
    form: str | None = None
    """In which form the peer was the fastest."""
    error: str | None = None
    """Why there are no figures."""
    parameters: int | None = None
    flops_per_sample: float | None = None
    """See `tasks.flops`; in training of the forward and the backward pass."""
    rounds_ms: tuple[float, ...] = ()
    """The median call of each round, in order."""
    median_ms: float | None = None
    """Of the rounds."""
    low_ms: float | None = None
    high_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    p50_ms: float | None = None
    """Of all calls, as `p95_ms`; of fewer than twenty calls there is none."""
    p95_ms: float | None = None
    items_per_second: float | None = None
    real_time_factor: float | None = None
    """Seconds for a second of audio."""
    flops_per_second: float | None = None
    weight_bytes: float | None = None
    """Least traffic of a call of ours: each weight that it needs once; in decoding and acting those of a step once for
    each step, without tables of which it reads a row. In training ten times 4 bytes of all: both passes read it, its
    gradient is written, AdamW reads weight, gradient and two moments and writes all but the gradient. Activations are
    left out. Peers have the same size, and are said to move as much."""
    matmul_fraction: float | None = None
    """Of the machine's matmul peak in this precision."""
    bandwidth_fraction: float | None = None
    """Of the machine's bandwidth, which `weight_bytes` alone take up if no cache holds them; of step-by-step work."""
    peak_memory_bytes: int | None = None
    """Of a fresh process that does the work once: all of it, libraries included; on CUDA what torch allocates."""
    ratio: float | None = None
    """This median over ours: above 1 ours is faster."""
    ratio_low: float | None = None
    """The least of the rounds' ratios."""
    ratio_high: float | None = None
    notes: tuple[str, ...] = ()
    """What makes a figure doubtful, and what else is to be known of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A work under one condition."""

    task: str
    size: str
    model: str
    work: str
    batch: int
    unit: str
    items: float
    """Of `unit` in a call."""
    precision: str
    compile: bool
    attention: str | None
    error: str | None = None
    """Why it was not measured."""
    entries: tuple[Entry, ...] = ()
    """Ours first."""
    notes: tuple[str, ...] = ()
    """What is to be known of all of them."""

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same row in another file."""
        return (self.task, self.model, self.work, self.batch, self.precision, self.compile, self.attention)

    @property
    def errors(self) -> list[str]:
        """All that failed, with who."""
        own = [] if self.error is None else [self.error]
        return own + [f"{entry.name}: {entry.error}" for entry in self.entries if entry.error is not None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole benchmark."""

    kind: str = KIND
    version: int = VERSION
    created: str
    """When it began, ISO 8601."""
    command: str
    complete: bool
    """Whether all was measured that was asked for; False after Ctrl-C."""
    rounds: int
    machine: Machine
    packages: dict[str, str]
    """Versions of this suite and of all peers, by distribution."""
    skipped: tuple[str, ...]
    """Peers and precisions that cannot be had, and why."""
    rows: tuple[Row, ...]


def write(path: Path, report: Report) -> None:
    """Write the file whole or not at all."""
    write_whole(path, (json.dumps(asdict(report), indent=1) + "\n").encode())


def read(path: Path) -> Report:
    """A file of this command's; ValueError, in one line that names it, for any other."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}, expected a file of multimodal benchmark --json") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({one_line(error)}), expected that of multimodal benchmark") from None
    if not isinstance(values, dict) or values.get("kind") != KIND:
        raise ValueError(f"{path}: JSON of another kind, expected that of multimodal benchmark")
    if values.get("version") != VERSION:
        raise ValueError(f"{path}: version is {values.get('version')!r:.40}, expected {VERSION}: measure again")
    try:
        report: Report = from_plain(Report, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return report


def compare(old: Report, new: Report) -> list[tuple[str, ...]]:
    """A table of both, with its header: the milliseconds of everyone, and the old ones over the new."""
    header = ("task", "model, work", "precision", "who", "old ms", "new ms", "old / new")
    before, after = _medians(old), _medians(new)
    table: list[tuple[str, ...]] = [header]
    for key in [*before, *(key for key in after if key not in before)]:
        a, b = before.get(key), after.get(key)
        task, model, work, batch, precision, compiled, attention, who = key
        more = "".join([", compiled" * bool(compiled), f", {attention}" if attention else ""])
        change = f"{a / b:.2f}" if a and b else "not in new" if key not in after else "not in old"
        if key in before and key in after and not (a and b):
            change = "failed"
        table.append(
            (str(task), f"{model}, {work}, batch {batch}", f"{precision}{more}", str(who), _ms(a), _ms(b), change)
        )
    return table


def _medians(report: Report) -> dict[tuple[object, ...], float | None]:
    found: dict[tuple[object, ...], float | None] = {}
    for row in report.rows:
        found[(*row.key, OURS)] = None
        found |= {(*row.key, entry.name): entry.median_ms for entry in row.entries}
    return found


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"
