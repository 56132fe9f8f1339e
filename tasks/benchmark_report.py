"""A benchmark as people read it: a table on the terminal, Markdown with charts beside it, one HTML page."""

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path

from multimodal.pretrained.files import write_whole
from tasks.benchmark_json import Entry, Report, Row

PRECISION = {"32": "fp32"}
"""What is typed, as it is shown."""
Cell = Callable[[Row, Entry], str]
TITLE = "Benchmarks"
LEGEND = (
    "ms: median of the rounds, beside it their range. fwd / bwd / opt: forward pass, backward pass and optimizer of a "
    "training step. p50 / p95: of all calls, where there are enough. GFLOP: of a sample, products, convolutions and "
    "attention, 2 for a multiplication with its addition; in training with the backward pass. of peak: of the matmul "
    "peak that this machine reached in that precision. of bandwidth: of the machine's, taken up by the weights that "
    "step-by-step work reads in each step, if no cache holds them. memory: peak of a fresh process, libraries "
    "included; on CUDA of what is allocated. RTF: real-time factor, seconds for a second of audio. / ours: their time "
    "over ours, more than 1 = ours is faster, beside it the range of the rounds. In bf16 training is autocast, all "
    "else has weights in bf16. A star refers to the notes."
)

# ------------------------------------------------------------------------------------------------------------- numbers


def number(value: float | None) -> str:
    """With three digits, or all before the point."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def _time(row: Row, entry: Entry) -> str:
    if entry.median_ms is None:
        return "failed" if entry.error else "not compared"
    return number(entry.median_ms) + "*" * bool(entry.notes)


def _range(low: float | None, high: float | None, show: Callable[[float | None], str] = number) -> str:
    return "" if low is None or high is None else f"{show(low)}–{show(high)}"


def _parts(row: Row, entry: Entry) -> str:
    parts = (entry.forward_ms, entry.backward_ms, entry.optimizer_ms)
    return "" if parts[0] is None else " / ".join(map(number, parts))


def _percentiles(row: Row, entry: Entry) -> str:
    return "" if entry.p95_ms is None else f"{number(entry.p50_ms)} / {number(entry.p95_ms)}"


def _speed(row: Row, entry: Entry) -> str:
    if entry.items_per_second is None:
        return ""
    rtf = "" if entry.real_time_factor is None else f", RTF {entry.real_time_factor:.3g}"
    return f"{number(entry.items_per_second)} {row.unit}{rtf}"


def _million(row: Row, entry: Entry) -> str:
    return "" if entry.parameters is None else f"{entry.parameters / 1e6:.2f}"


def _gflop(row: Row, entry: Entry) -> str:
    return "" if entry.flops_per_sample is None else f"{entry.flops_per_sample / 1e9:.3g}"


def _memory(row: Row, entry: Entry) -> str:
    return "" if entry.peak_memory_bytes is None else f"{entry.peak_memory_bytes / 2**20:.0f} MiB"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _who(row: Row, entry: Entry) -> str:
    return f"{entry.name} ({entry.form})" if entry.form else entry.name


def work_of(row: Row, *, precise: bool = True) -> str:
    """What is done, with what is unusual about how; `precise` = with the precision."""
    unusual = [one for one in ("compiled" if row.compile else "", row.attention or "") if one]
    precision = [PRECISION.get(row.precision, row.precision)] if precise else []
    return ", ".join([row.model, row.work, f"batch {row.batch}", *precision, *unusual])


SHORT: dict[str, Cell] = {
    "who": _who,
    "ms": _time,
    "a second": _speed,
    "of peak": lambda row, entry: _percent(entry.matmul_fraction),
    "memory": _memory,
    "/ ours": lambda row, entry: _ratio(entry.ratio),
}
"""Columns on the terminal."""
LONG: dict[str, Cell] = {
    "who": _who,
    "M parameters": _million,
    "GFLOP": _gflop,
    "ms": _time,
    "range": lambda row, entry: _range(entry.low_ms, entry.high_ms),
    "fwd / bwd / opt": _parts,
    "p50 / p95": _percentiles,
    "a second": _speed,
    "of peak": lambda row, entry: _percent(entry.matmul_fraction),
    "of bandwidth": lambda row, entry: _percent(entry.bandwidth_fraction),
    "memory": _memory,
    "/ ours": lambda row, entry: _ratio(entry.ratio),
    "range of / ours": lambda row, entry: _range(entry.ratio_low, entry.ratio_high, _ratio),
}
"""Columns of the reports."""


def cells(rows: Sequence[Row], columns: dict[str, Cell]) -> list[list[str]]:
    """The table with its header; the work stands in the first of its lines alone."""
    table = [["work", *columns]]
    for row in rows:
        if row.error is not None:
            table.append([work_of(row), f"failed: {row.error}", *[""] * (len(columns) - 1)])
        for index, entry in enumerate(row.entries):
            work = "" if index else work_of(row) + "*" * bool(row.notes)
            table.append([work, *(cell(row, entry) for cell in columns.values())])
    return table


def aligned(table: Sequence[Sequence[str]]) -> str:
    """A table for the terminal. A cell with nothing but empty ones behind it takes no part in the widths."""
    short = [row for row in table if any(row[2:])] or table
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(line.rstrip() for line in lines)


def by_task(report: Report) -> dict[str, list[Row]]:
    """The rows of each task."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        found.setdefault(row.task, []).append(row)
    return found


def facts(report: Report) -> list[str]:
    """The machine, the versions, and what is missing."""
    machine = report.machine
    peaks = ", ".join(f"{PRECISION.get(name, name)} {flops / 1e9:.0f}" for name, flops in machine.matmul.items())
    packages = ", ".join(f"{name} {version}" for name, version in report.packages.items())
    found = [
        f"Machine: {machine.name}, {machine.cores} cores, {machine.threads} threads, load {machine.load:.1f} at the "
        f"start; {machine.system}, Python {machine.python}, torch {machine.torch}, device {machine.device}.",
        f"Its own peaks: matmul {peaks} GFLOP/s, memory {machine.bandwidth / 1e9:.0f} GB/s.",
        f"Versions: {packages}.",
        f"Interleaved rounds: {report.rounds}; begun {report.created}.",
    ]
    if not report.complete:
        found.append("Stopped before all was measured.")
    return found + [f"Skipped: {peer}." for peer in report.skipped]


def notes(report: Report) -> list[str]:
    """What failed, what is in doubt, and what else is to be known."""
    found = []
    for row in report.rows:
        found += [f"{row.task}: {work_of(row)}: {error}" for error in row.errors]
        found += [f"{work_of(row)}: {note}" for note in row.notes]
        found += [f"{work_of(row)}, {entry.name}: {note}" for entry in row.entries for note in entry.notes]
    return found


# --------------------------------------------------------------------------------------------------------------- forms


def terminal(report: Report) -> str:
    """The short table, and below it what is to be known about it."""
    return "\n\n".join([aligned(cells(report.rows, SHORT)), "\n".join(facts(report) + notes(report))])


def write_markdown(path: Path, report: Report, charts: dict[str, bytes]) -> None:
    """The table of each task; the charts, PNG by name, are written beside it as `STEM-NAME.png`."""
    parts = [f"# {TITLE}", f"    {report.command}", *facts(report)]
    for name, picture in charts.items():
        beside = path.with_name(f"{path.stem}-{name}.png")
        write_whole(beside, picture)
        parts.append(f"![{name}]({beside.name})")
    for task, rows in by_task(report).items():
        table = [[cell.replace("|", "\\|") for cell in row] for row in cells(rows, LONG)]
        rule = ["---"] * len(table[0])
        parts += [f"## {task}", "\n".join(f"| {' | '.join(row)} |" for row in (table[0], rule, *table[1:]))]
    parts += ["## Legend", LEGEND]
    if found := notes(report):
        parts += ["## Notes", "\n".join(f"- {note}" for note in found)]
    write_whole(path, ("\n\n".join(parts) + "\n").encode())


_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: left; border-bottom: 1px solid #ddd; white-space: nowrap }
th { background: #f3f3f3 } img { max-width: 100% } pre { background: #f3f3f3; padding: .7em; overflow-x: auto }
div { overflow-x: auto } td:first-child { white-space: normal }
"""


def write_html(path: Path, report: Report, charts: dict[str, bytes]) -> None:
    """One page that needs nothing else: charts and style are within it."""
    parts = [f"<h1>{TITLE}</h1>", f"<pre>{html.escape(report.command)}</pre>"]
    parts += [f"<p>{html.escape(fact)}</p>" for fact in facts(report)]
    for name, picture in charts.items():
        data = base64.b64encode(picture).decode()
        parts.append(f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{data}"></p>')
    for task, rows in by_task(report).items():
        parts += [f"<h2>{html.escape(task)}</h2>", _html_table(cells(rows, LONG))]
    parts += ["<h2>Legend</h2>", f"<p>{html.escape(LEGEND)}</p>"]
    if found := notes(report):
        parts += ["<h2>Notes</h2>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in found), "</ul>"]
    head = f'<meta charset="utf-8"><title>{TITLE}</title><style>{_STYLE}</style>'
    page = f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"
    write_whole(path, page.encode())


def _html_table(table: Sequence[Sequence[str]]) -> str:
    lines = []
    for index, row in enumerate(table):
        tag = "td" if index else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return "<div><table>\n" + "\n".join(lines) + "\n</table></div>"
