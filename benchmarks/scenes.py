"""AP of `multimodal fit detr`, the default recipe on drawn scenes, beside the plain DETR of the same size and steps.

    python benchmarks/scenes.py [--seeds 0]

Scenes of the test set with what the first run finds in them
become docs/detr_scenes.png, its curves docs/detr_curves.png.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from fit import train
from PIL import Image
from report import DOCS, origin, write_section

from multimodal.data.scenes import draw_scene
from tasks.detr.data import SERIES
from tasks.detr.draw import draw
from tasks.detr.predict import Finder, Picture, detection_transform
from tasks.run import read_metrics

PLAIN = {
    "model.scores": "softmax",
    "model.queries": "learned",
    "model.modulated": "false",
    "model.denoising": "0",
    "model.cost_class": "1",
    "model.weight_class": "1",
    **{f"model.{part}.norm_order": "post" for part in ("encoder", "decoder")},
    "model.encoder.final_norm": "false",
    # At the recipe's rate it learns nothing.
    "model.lr": "2.0e-4",
}
"""What makes the recipe the published DETR, but for its size, at a rate that suits it."""
COLUMNS = ("AP", "AP50", "AP75", "AP_small", "AP_medium")
SHOWN = (1, 4, 7, 12, 15, 18, 22, 27)
"""Scenes of the picture."""


def row(name: str, run: Path, wall: float) -> str:
    measured = [line for line in read_metrics(run) if "test/AP" in line][-1]
    seconds = json.loads((run / "summary.json").read_text())["seconds"]
    values = " | ".join(f"{measured[f'test/{column}']:.3f}" for column in COLUMNS)
    return f"| {name} | {values} | {seconds:.0f} | {wall:.0f} |"


def show(run: Path, place: Path) -> None:
    """Unseen scenes with what is found in them, four a row."""
    finder = Finder.load(str(run), 0.5, torch.device("cpu"))
    transform = detection_transform(finder.preprocess)
    images = [draw_scene(SERIES["test"], index).image for index in SHOWN]
    found = finder.find([Picture(image, transform(image)) for image in images])
    drawn = [draw(image, detections).resize((320, 320)) for image, detections in zip(images, found, strict=True)]
    sheet = Image.new("RGB", (4 * 324 - 4, (len(drawn) + 3) // 4 * 324 - 4), "white")
    for index, picture in enumerate(drawn):
        sheet.paste(picture, (index % 4 * 324, index // 4 * 324))
    sheet.quantize(128).save(place, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--no-plain", action="store_true", help="leave out the plain DETR")
    args = parser.parse_args()
    heading = origin("pytorch-lightning", "faster-coco-eval")
    rows = [f"| run | {' | '.join(COLUMNS)} | training, s | whole command, s |", f"|{'---|' * (len(COLUMNS) + 3)}"]
    runs = [(f"the recipe, seed {seed}", seed, {}) for seed in args.seeds]
    if not args.no_plain:
        runs.append((f"plain DETR of the same size and steps, seed {args.seeds[0]}", args.seeds[0], PLAIN))
    for number, (name, seed, flags) in enumerate(runs):
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("detr", Path(folder), {"seed_everything": str(seed), **flags})
            rows.append(row(name, run, wall))
            if number == 0:
                shutil.copy(run / "curves.png", DOCS / "detr_curves.png")
                show(run, DOCS / "detr_scenes.png")
        print(rows[-1], flush=True)
    closing = "On the 300 scenes of the test set, which training never sees; by the checkpoint that is best on val."
    pictures = ["![scenes with what is found in them](detr_scenes.png)", "", "![curves](detr_curves.png)"]
    write_section("DETR on drawn scenes", [heading, "", *rows, "", closing, "", *pictures])


if __name__ == "__main__":
    main()
