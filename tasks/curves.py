"""curves.png: how a run went, from its metrics.csv."""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.run import read_metrics

Rows = list[dict[str, float]]


def draw_curves(run: Path) -> None:
    """Draw losses, validated metrics and learning rate over the steps; nothing where nothing was logged."""
    rows = read_metrics(run)
    names = sorted({name for row in rows for name in row})
    # Without those of single classes, such as val/AP/cat.
    metrics = [name for name in names if name.startswith("val/") and name.count("/") == 1 and name != "val/loss"]
    panels = {"loss": ["train/loss", "val/loss"], "metric": metrics, "learning rate": ["lr"]}
    panels = {title: kept for title, wanted in panels.items() if (kept := [name for name in wanted if name in names])}
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, wanted) in zip(axes, panels.items(), strict=True):
        _draw(axis, title, wanted, rows)
    figure.savefig(run / "curves.png", dpi=120)


def _draw(axis: Axes, title: str, names: Iterable[str], rows: Rows) -> None:
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 60 else None)
    axis.set_title(title)
    axis.set_xlabel("optimizer step")
    axis.grid(alpha=0.3)
    axis.legend()
