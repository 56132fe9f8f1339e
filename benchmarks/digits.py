"""Test accuracy of `multimodal fit vit`, the default recipe on embedded digits, over three seeds.

    python benchmarks/digits.py

About six minutes on two otherwise idle cores. The curves of seed 0 become docs/vit_digits.png.
"""

import json
import shutil
import statistics
import tempfile
from pathlib import Path

from fit import train
from report import DOCS, origin, write_section

SEEDS = (0, 1, 2)


def main() -> None:
    heading = origin("pytorch-lightning", "scikit-learn")
    rows, accuracies = ["| seed | test accuracy | training, s |", "|---|---|---|"], []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            run, _ = train("vit", Path(folder), {"seed_everything": str(seed)})
            summary = json.loads((run / "summary.json").read_text())
            if seed == SEEDS[0]:
                shutil.copy(run / "curves.png", DOCS / "vit_digits.png")
        accuracies.append(summary["value"])
        rows.append(f"| {seed} | {summary['value']:.4f} | {summary['seconds']:.0f} |")
        print(rows[-1], flush=True)
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
    closing = f"Mean {mean:.4f}, standard deviation {spread:.4f}, on 360 test images that training never sees."
    write_section("ViT on handwritten digits", [heading, "", *rows, "", closing, "", "![curves](vit_digits.png)"])


if __name__ == "__main__":
    main()
