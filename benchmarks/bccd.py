"""Blood cells: configs/detr_bccd.yaml beside torchvision's Faster R-CNN with the same backbone, data and time.

    python benchmarks/bccd.py --root BCCD --weights tf_efficientnet_lite0.safetensors [--threads 2]    # half an hour
    python benchmarks/bccd.py                                                                          # the section

What was measured is kept in runs/bccd. The curves become docs/detr_bccd.png.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from report import DOCS, origin, write_section

from tasks.run import read_metrics

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "configs" / "detr_bccd.yaml"
NAMES = {"ours": "detr_bccd", "frcnn-0": "Faster R-CNN"}


def ours(root: str, weights: str, out: Path, threads: int) -> dict[str, Any]:
    """Train by the recipe; AP on val over the seconds, and that of the best weights on test."""
    flags = {"data.root": root, "model.backbone_weights": weights, "trainer.default_root_dir": str(out)}
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    command = [sys.executable, "-m", "tasks.cli", "fit", "detr", "--config", str(CONFIG), *arguments]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return read_run(max((out / "detr").iterdir()))


def read_run(run: Path) -> dict[str, Any]:
    """The figures of a run's folder. Seconds are shared out evenly over the steps."""
    rows, summary = read_metrics(run), json.loads((run / "summary.json").read_text())
    steps = max(row["step"] for row in rows if "val/AP" in row)
    curve = [
        [row["step"] / steps * summary["seconds"], row["val/AP"], row["val/AP50"]] for row in rows if "val/AP" in row
    ]
    test = [row for row in rows if "test/AP" in row][-1]
    measured = {f"test_{name.removeprefix('test/')}": value for name, value in test.items() if name.startswith("test/")}
    return {"curve": curve, "seconds": summary["seconds"], **measured}


def report(out: Path) -> None:
    """The section and its picture."""
    results = {name: json.loads((out / f"{name}.json").read_text()) for name in NAMES}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rows = ["| model | test AP50 | test AP | training, minutes |", "|---|---|---|---|"]
    for key, name in NAMES.items():
        result = results[key]
        minutes = [seconds / 60 for seconds, _, _ in result["curve"]]
        axes.plot(minutes, [ap50 for _, _, ap50 in result["curve"]], marker="o", label=f"{name}, AP50")
        axes.plot(minutes, [ap for _, ap, _ in result["curve"]], marker=".", linestyle="--", label=f"{name}, AP")
        rows.append(f"| {name} | {result['test_AP50']:.3f} | {result['test_AP']:.3f} | {minutes[-1]:.0f} |")
    axes.set(xlabel="minutes of training", ylabel="on the validation images", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(DOCS / "detr_bccd.png", dpi=110)
    about = (
        "292 images at 400 pixels, a fifth held out for testing (58) and a tenth for validation. Both start from the "
        "same EfficientNet-Lite0, and have the same split, augmentation, batches and wall time, side by side."
    )
    section = [origin("pytorch-lightning", "torchvision", "timm"), "", about, "", *rows, "", "![curves](detr_bccd.png)"]
    write_section("Blood cells beside Faster R-CNN", section)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="the data; without it: the section from what was measured")
    parser.add_argument("--weights", help="weights of timm's tf_efficientnet_lite0")
    parser.add_argument("--threads", type=int, default=1, help="of each of the two, which run at the same time")
    parser.add_argument("--out", type=Path, default=Path("runs/bccd"))
    args = parser.parse_args()
    if args.root:
        if not args.weights:
            parser.error("a run needs --weights")
        args.out.mkdir(parents=True, exist_ok=True)
        shared = [
            "--root",
            args.root,
            "--weights",
            args.weights,
            "--threads",
            str(args.threads),
            "--out",
            str(args.out),
        ]
        other = subprocess.Popen([sys.executable, str(HERE / "faster_rcnn.py"), *shared, "--minutes", "28"])
        (args.out / "ours.json").write_text(json.dumps(ours(args.root, args.weights, args.out, args.threads)))
        if other.wait():
            sys.exit(other.returncode)
    report(args.out)


if __name__ == "__main__":
    main()
