"""A picture of the returns that were asked for, and those achieved."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure

from multimodal.pretrained.files import write_whole
from tasks.dt.environment import Result


def draw(path: Path, results: Sequence[Result], data: tuple[float, float], title: str) -> None:
    """Each episode as a dot, mean and deviation for each target, and the diagonal on which both returns are the same.

    Args:
        path: the PNG to write.
        results: by target; a result without target is drawn over the whole width.
        data: lowest and highest return that was learned from.
        title: what stands above.
    """
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="return asked for", ylabel="return achieved", title=title)
    targets = [result.target for result in results if result.target is not None]
    ends = (min([*targets, data[0]]), max([*targets, data[1]]))
    axes.axvspan(*data, color="0.94", label="returns in the data")
    axes.plot(ends, ends, color="0.6", linestyle="--", linewidth=1, label="as asked")
    for number, result in enumerate(results):
        mean, deviation = float(result.returns.mean()), float(result.returns.std())
        if result.target is None:
            axes.axhline(mean, color="C1", label=f"without a target: {mean:.1f} ± {deviation:.1f}")
            continue
        axes.plot([result.target] * len(result.returns), result.returns, ".", color="C0", alpha=0.3)
        label = "mean ± deviation" if number == 0 else None
        axes.errorbar(result.target, mean, yerr=deviation, fmt="o", color="C0", capsize=4, label=label)
    axes.legend(frameon=False)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_whole(path, content.getbuffer())
