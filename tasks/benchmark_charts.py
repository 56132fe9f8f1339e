"""Charts of a benchmark: speed of each task, the roofline, ours against peers."""

from collections.abc import Iterator
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.benchmark_json import OURS, Entry, Report, Row
from tasks.benchmark_report import by_task, work_of

_OURS, _THEIRS = "#1f6f8b", "#c9a227"
_MARKS = "osD^vPX*"
_LINE = 0.28
"""Inches of a bar."""


def draw(report: Report) -> dict[str, bytes]:
    """PNG pictures by name; none of what was not measured."""
    figures = {"speed": _speed(report), "roofline": _roofline(report), "ratio": _ratio(report)}
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def _png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _measured(rows: list[Row]) -> Iterator[tuple[Row, Entry]]:
    for row in rows:
        yield from ((row, entry) for entry in row.entries if entry.median_ms is not None)


def _panels(counts: dict[str, int], title: str) -> tuple[Figure, dict[str, Axes]]:
    """A panel below the other for each task, as high as its bars need."""
    heights = [_LINE * count + 0.7 for count in counts.values()]
    figure = Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(len(counts), 1, squeeze=False, height_ratios=heights)[:, 0]
    return figure, dict(zip(counts, axes, strict=True))


def _speed(report: Report) -> Figure | None:
    """Ours alone: what is done in a second."""
    tasks = {task: [(r, e) for r, e in _measured(rows) if e.name == OURS] for task, rows in by_task(report).items()}
    tasks = {task: bars for task, bars in tasks.items() if bars}
    if not tasks:
        return None
    figure, panels = _panels({task: len(bars) for task, bars in tasks.items()}, "Throughput of this suite")
    for task, bars in tasks.items():
        axis = panels[task]
        values = [entry.items_per_second or 0.0 for _, entry in bars]
        axis.barh([work_of(row) for row, _ in bars], values, color=_OURS)
        for place, (value, (row, _)) in enumerate(zip(values, bars, strict=True)):
            axis.annotate(
                f" {value:.3g} {row.unit}/s", (value, place), va="center", fontsize=8, annotation_clip=False
            )
        _finish(axis, task)
        axis.set_xlim(min(values) / 3, max(values) * 8)
    return figure


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", alpha=0.3)


def _ratio(report: Report) -> Figure | None:
    """Peers' times over ours, with the range of the rounds."""
    tasks = {task: [(r, e) for r, e in _measured(rows) if e.ratio is not None] for task, rows in by_task(report).items()}
    tasks = {task: bars for task, bars in tasks.items() if bars}
    if not tasks:
        return None
    title = "Time of published implementations over ours: beyond 1 this suite is faster"
    figure, panels = _panels({task: len(bars) for task, bars in tasks.items()}, title)
    for task, bars in tasks.items():
        axis = panels[task]
        for place, (row, entry) in enumerate(bars):
            ratio, low, high = (float(x or 1.0) for x in (entry.ratio, entry.ratio_low, entry.ratio_high))
            axis.barh(place, ratio - 1, left=1, color=_OURS if ratio >= 1 else _THEIRS)
            axis.plot([low, high], [place, place], color="black", linewidth=1)
            axis.annotate(f" {ratio:.2f}", (max(ratio, high), place), va="center", fontsize=8)
        axis.set_yticks(range(len(bars)), [f"{work_of(row)} — {entry.name}" for row, entry in bars])
        axis.axvline(1, color="black", linewidth=0.8)
        _finish(axis, task)
        axis.margins(x=0.15)
    return figure


def _roofline(report: Report) -> Figure | None:
    """Operations a second over operations for each byte of weights, below what the machine can do."""
    points = [
        (row, entry)
        for row, entry in _measured(list(report.rows))
        if entry.name == OURS and entry.flops_per_second and entry.parameters
    ]
    if not points:
        return None
    figure = Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    machine, tasks = report.machine, list(by_task(report))
    places = []
    for row, entry in points:
        place = (entry.flops_per_sample or 0.0) * row.batch / least_bytes(row, entry)
        places.append(place)
        task = tasks.index(row.task)
        label = row.task if row.task not in axis.get_legend_handles_labels()[1] else None
        axis.scatter(
            place,
            (entry.flops_per_second or 0.0) / 1e9,
            marker=_MARKS[task % len(_MARKS)],
            color=f"C{task}",
            facecolors=f"C{task}" if row.precision == "32" else "none",
            label=label,
        )
    ends = [min(places) / 3, max(places) * 3]
    for name, peak in machine.matmul.items():
        knee = peak / machine.bandwidth
        line = sorted({*ends, min(max(knee, ends[0]), ends[1])})
        axis.plot(line, [min(peak, machine.bandwidth * x) / 1e9 for x in line], color="grey", linewidth=1)
        axis.annotate(f"{name}: {peak / 1e9:.0f} GFLOP/s", (ends[1], peak / 1e9), ha="right", va="bottom", fontsize=8)
    axis.set(xscale="log", yscale="log", ylabel="GFLOP/s")
    axis.set_xlabel("operations for each byte of weights that must be moved (activations are left out)")
    axis.set_title(f"Roofline: memory {machine.bandwidth / 1e9:.0f} GB/s; filled = float32, open = lower precision")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return figure


def least_bytes(row: Row, entry: Entry) -> float:
    """What a call moves at least: all weights once; in training ten times, always in float32.

    Forward and backward pass read them, a gradient is written; AdamW reads weights, gradients and two moments, and
    writes all but the gradients. Decoding reads more, which makes a point lie too far right.
    """
    trains = entry.forward_ms is not None
    size = 4 if trains or row.precision == "32" else 2
    return float((entry.parameters or 0) * size * (10 if trains else 1))
