"""Charts of a benchmark: speed of each task, the roofline, ours against peers."""

from collections.abc import Iterator, Sequence
from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tasks.benchmark_json import OURS, Entry, Report, Row
from tasks.benchmark_report import PRECISION, by_task, number, work_of

_COLORS = ("#1f6f8b", "#8fc1d4")
"""Of precisions."""
_OURS, _THEIRS = _COLORS[0], "#c9a227"
"""Of ratios, by who is the faster one."""
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


def _measured(rows: Sequence[Row]) -> Iterator[tuple[Row, Entry]]:
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
    """Ours alone: what is done in a second, precisions one below the other."""
    tasks: dict[str, dict[str, dict[str, float]]] = {}
    units = {}
    for row, entry in _measured(report.rows):
        if entry.name == OURS:
            title = work_of(row, precise=False)
            tasks.setdefault(row.task, {}).setdefault(title, {})[row.precision] = entry.items_per_second or 0.0
            units[title] = row.unit
    if not tasks:
        return None
    precisions = list(report.machine.matmul)
    height = 0.85 / len(precisions)
    counts = {task: len(works) * len(precisions) for task, works in tasks.items()}
    figure, panels = _panels(counts, "Throughput of this suite")
    for task, works in tasks.items():
        axis = panels[task]
        for index, precision in enumerate(precisions):
            places = {place + (index - (len(precisions) - 1) / 2) * height: work for place, work in enumerate(works)}
            bars = {at: works[work][precision] for at, work in places.items() if precision in works[work]}
            label = PRECISION.get(precision, precision)
            axis.barh(list(bars), list(bars.values()), height, color=_COLORS[index], label=label)
            for at, value in bars.items():
                _told(axis, at, f"{number(value)} {units[places[at]]}/s")
        _finish(axis, task, list(works))
        values = [value for work in works.values() for value in work.values()]
        axis.set_xlim(min(values) / 3, max(values) * 1.2)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=len(precisions), fontsize=8)
    return figure


def _finish(axis: Axes, title: str, lines: Sequence[str]) -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xscale("log")
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.tick_params(labelsize=8)
    axis.grid(axis="x", alpha=0.3)


def _told(axis: Axes, place: float, text: str) -> None:
    """Beside the panel, where nothing else is."""
    axis.text(1.01, place, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8)


def _ratio(report: Report) -> Figure | None:
    """The times of peers over ours: of the fastest a bar with the range of the rounds, of the others a dot."""
    tasks: dict[str, dict[str, list[Entry]]] = {}
    for row, entry in _measured(report.rows):
        if entry.ratio is not None:
            tasks.setdefault(row.task, {}).setdefault(work_of(row), []).append(entry)
    if not tasks:
        return None
    title = "Time of the fastest published implementation over ours: beyond 1 this suite is faster (dots: the others)"
    figure, panels = _panels({task: len(works) for task, works in tasks.items()}, title)
    for task, works in tasks.items():
        axis = panels[task]
        for place, entries in enumerate(works.values()):
            strongest, *others = sorted(entries, key=lambda entry: entry.ratio or 0.0)
            ratio, low, high = (float(x or 1.0) for x in (strongest.ratio, strongest.ratio_low, strongest.ratio_high))
            axis.barh(place, ratio - 1, left=1, color=_OURS if ratio >= 1 else _THEIRS)
            axis.plot([low, high], [place, place], color="black", linewidth=1)
            dots = [float(entry.ratio or 1.0) for entry in others]
            axis.plot(dots, [place] * len(dots), "o", color="grey", markersize=3)
            _told(axis, place, f"{ratio:.2f} {strongest.name}")
        axis.axvline(1, color="black", linewidth=0.8)
        _finish(axis, task, list(works))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    return figure


def _roofline(report: Report) -> Figure | None:
    """Operations a second over operations for each byte of weights, below what the machine can do."""
    points = [
        (row, entry.flops_per_second, entry.flops_per_sample * row.batch / entry.weight_bytes)
        for row, entry in _measured(report.rows)
        if entry.name == OURS and entry.flops_per_second and entry.flops_per_sample and entry.weight_bytes
    ]
    if not points:
        return None
    figure = Figure(figsize=(10, 6), layout="constrained")
    axis = figure.subplots()
    machine, tasks = report.machine, list(by_task(report))
    for row, speed, place in points:
        index = tasks.index(row.task)
        label = row.task if row.task not in axis.get_legend_handles_labels()[1] else None
        face = f"C{index}" if row.precision == "32" else "none"
        marker = _MARKS[index % len(_MARKS)]
        axis.scatter(place, speed / 1e9, marker=marker, color=f"C{index}", facecolors=face, label=label)
    low, high = min(place for *_, place in points) / 3, max(place for *_, place in points) * 3
    for name, peak in machine.matmul.items():
        line = sorted({low, high, min(max(peak / machine.bandwidth, low), high)})
        axis.plot(line, [min(peak, machine.bandwidth * x) / 1e9 for x in line], color="grey", linewidth=1)
        told = f"{PRECISION.get(name, name)}: {peak / 1e9:.0f} GFLOP/s"
        axis.annotate(told, (high, min(peak, machine.bandwidth * high) / 1e9), ha="right", va="bottom", fontsize=8)
    axis.set(xscale="log", yscale="log", ylabel="GFLOP/s")
    axis.set_xlabel("operations for each byte of weights that must be moved (activations are left out)")
    axis.set_title(f"Roofline: memory {machine.bandwidth / 1e9:.0f} GB/s; filled = fp32, open = lower precision")
    axis.grid(alpha=0.3, which="both")
    axis.legend()
    return figure
