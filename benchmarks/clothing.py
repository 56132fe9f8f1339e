"""ViT-Ti from scratch on photographs of clothing: this suite beside a plain loop around timm, and the whole recipe.

    python benchmarks/clothing.py --which ours --seed 0 --root PHOTOS    # one run, kept in runs/clothing
    python benchmarks/clothing.py                                        # the section, from all runs there

`ours` (the command line) and `timm` (a loop written out below) have the same size, images, augmentation, order of
images, optimizer and schedule; `recipe` is configs/vit_clothing.yaml as it is. A run of the first two takes about five
minutes on one core, the recipe a quarter of an hour on two. PHOTOS holds train/ and val/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import timm
import torch
from report import origin, write_section
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from multimodal.data import Augmentation
from tasks.optim import warmup_cosine
from tasks.vit.data import ImageData

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "vit_clothing.yaml"
SEEDS = (0, 1, 2)
EPOCHS, BATCH, LR, WEIGHT_DECAY, WARMUP, CLIP = 20, 64, 3e-4, 0.05, 0.1, 1.0
CROP = (0.5, 1.0)


def ours(root: str, seed: int, *, plain: bool = True) -> dict[str, Any]:
    """The command line on the recipe, or on what is left of it without all that the plain loop does not have."""
    flags: dict[str, Any] = {"data.root": root, "seed_everything": seed, "trainer.enable_progress_bar": "false"}
    if plain:
        flags |= {
            "trainer.max_epochs": EPOCHS,
            "trainer.gradient_clip_val": CLIP,
            "model.init": "vit",
            "model.lr": LR,
            "model.weight_decay": WEIGHT_DECAY,
            "model.warmup": WARMUP,
            "model.label_smoothing": 0,
            "model.mixup": 0,
            "model.cutmix": 0,
            "model.drop_path": 0,
            "model.ema_decay": "null",
            "data.batch_size": BATCH,
            "data.num_workers": 0,
            "data.augment.crop_scale": list(CROP),
            "data.augment.horizontal_flip": 0.5,
            "data.augment.rand_augment": "null",
        }
    with tempfile.TemporaryDirectory() as folder:
        flags["trainer.default_root_dir"] = folder
        arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "tasks.cli", "fit", "vit", "--config", str(CONFIG), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = (Path(folder) / "vit").iterdir()
        rows = [row.split(",") for row in (run / "metrics.csv").read_text().splitlines()]
        column = rows[0].index("val/accuracy")
        seconds = json.loads((run / "summary.json").read_text())["seconds"]
    return {"accuracies": [float(row[column]) for row in rows[1:] if row[column]], "seconds": seconds}


def plain_loop(root: str, seed: int) -> dict[str, Any]:
    """Timm's vit_tiny in a loop as anybody would write it."""
    torch.manual_seed(seed)
    augment = Augmentation(crop_scale=CROP, horizontal_flip=0.5)
    data = ImageData(root=root, image_size=64, channels=3, batch_size=BATCH, num_workers=0, seed=seed, augment=augment)
    data.setup("fit")
    train, val = data.train_dataloader(), data.val_dataloader()
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=data.num_classes)
    exempt = {"pos_embed", "cls_token"}
    decayed = [p for name, p in model.named_parameters() if p.ndim >= 2 and name not in exempt]
    rest = [p for name, p in model.named_parameters() if p.ndim < 2 or name in exempt]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    schedule = LambdaLR(optimizer, warmup_cosine(EPOCHS * len(train), WARMUP))
    accuracies, start = [], time.perf_counter()
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)
        for batch in train:
            with torch.autocast("cpu", torch.bfloat16):
                loss = cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            hits = [(model(batch["image"]).argmax(1) == batch["label"]).float() for batch in val]
        model.train()
        accuracies.append(float(torch.cat(hits).mean()))
        print(f"epoch {epoch}: {accuracies[-1]:.4f}", flush=True)
    return {"accuracies": accuracies, "seconds": time.perf_counter() - start}


def report(out: Path) -> None:
    names = {"ours": "this suite, plain setting", "timm": "plain loop around timm", "recipe": "the whole recipe"}
    rows = ["| run | seeds | val accuracy at the end | mean | training, s |", "|---|---|---|---|---|"]
    for which, name in names.items():
        runs = [json.loads(path.read_text()) for path in sorted(out.glob(f"{which}-*.json"))]
        if runs:
            finals = [run["accuracies"][-1] for run in runs]
            spread = f" ± {statistics.stdev(finals):.3f}" if len(finals) > 1 else ""
            rows.append(
                f"| {name} | {len(runs)} | {', '.join(f'{final:.3f}' for final in finals)} "
                f"| **{statistics.mean(finals):.3f}**{spread} | {statistics.mean(run['seconds'] for run in runs):.0f} |"
            )
    about = (
        f"ViT-Ti, 64 × 64 pixels in patches of 16, from scratch, bfloat16 autocast. The plain setting is {EPOCHS} "
        f"epochs of random crops and flips with AdamW, warm-up and a cosine, on one thread, so that several can run at "
        "a time (their seconds compare nothing); the recipe has two."
    )
    write_section("ViT on photographs of clothing", [origin("timm", "pytorch-lightning"), "", about, "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--which", choices=("ours", "timm", "recipe"), help="what to run; without it: the section")
    parser.add_argument("--root", help="the photographs: train/ and val/")
    parser.add_argument("--out", type=Path, default=Path("runs/clothing"), help="a folder for the results of the runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.which and not args.root:
        parser.error("a run needs --root")
    if args.which is None:
        report(args.out)
        return
    if args.which != "recipe":
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    run = plain_loop if args.which == "timm" else ours
    options = {"plain": False} if args.which == "recipe" else {}
    result = run(args.root, args.seed, **options)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.which}-{args.seed}.json").write_text(json.dumps(result))
    print(args.which, args.seed, result)


if __name__ == "__main__":
    main()
