"""What `multimodal fit` costs beside a bare loop of the same steps: ViT-S/16 at 224 pixels, batch 8.

    python benchmarks/fit_overhead.py [--rounds 9] [--steps 10]

About four minutes on two idle cores. Fit (with its default callbacks, loggers and progress bar) and loop take turns in
one process, on the same files through the same loader. What counts is the time of an epoch's steps: set-up, validation
and the saves at the end of an epoch, which a bare loop does not have, are left out. Both have no clipping and no moving
average.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from PIL import Image
from pytorch_lightning import Callback, LightningModule, Trainer
from report import origin, write_section
from torch.nn.functional import cross_entropy

from multimodal.models.vit import SIZES
from tasks.console import quiet_lightning
from tasks.optim import parameter_groups, warmup_cosine
from tasks.registry import get
from tasks.trainer_cli import TaskCLI

BATCH = 8
DOUBTFUL = 0.1
"""Range of the rounds above which their median says little about a few per cent."""


class Clock(Callback):
    """The time of an epoch's steps, without set-up and validation."""

    seconds = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds = -time.perf_counter()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter()


def photos(root: Path, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", steps * BATCH), ("val", BATCH)):
        for index in range(count):
            place = root / split / str(index % 2)
            place.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(256, (224, 224, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(place / f"{index}.jpg")


def command(root: Path, runs: Path, held: ExitStack) -> TaskCLI:
    sizes = [f"--model.{name}={value}" for name, value in SIZES["S"].items()]
    model = ["--model.image_size=224", "--model.patch_size=16", "--model.in_channels=3", "--model.ema_decay=null"]
    data = [f"--data.root={root}", f"--data.batch_size={BATCH}", "--data.num_workers=0"]
    trainer = ["--trainer.max_epochs=1", f"--trainer.default_root_dir={runs}", "--trainer.gradient_clip_val=null"]
    return TaskCLI("fit", get("vit"), [*sizes, *model, *data, *trainer], held)


def fit(root: Path, runs: Path) -> float:
    """Seconds of an epoch by the command."""
    clock = Clock()
    with ExitStack() as held:
        cli = command(root, runs, held)
        cli.trainer.callbacks.insert(0, clock)
        cli.trainer.fit(cli.model, cli.datamodule)
    return clock.seconds


def loop(root: Path, runs: Path, steps: int) -> float:
    """Seconds of an epoch by a bare loop."""
    with ExitStack() as held:
        cli = command(root, runs, held)
    cli.datamodule.setup("fit")
    loader, model, options = cli.datamodule.train_dataloader(), cli.model.model.train(), cli.model.hparams
    groups = parameter_groups(model, lr=options["lr"], weight_decay=options["weight_decay"])
    optimizer = torch.optim.AdamW(groups, betas=options["betas"], fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(steps, options["warmup"]))
    started = time.perf_counter()
    for batch in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch["image"]), batch["label"], label_smoothing=options["label_smoothing"])
        loss.backward()
        optimizer.step()
        schedule.step()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    quiet_lightning()
    heading = origin("pytorch-lightning")
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as folder:
        root, runs = Path(folder, "photos"), Path(folder, "runs")
        photos(root, args.steps)
        loop(root, runs, args.steps)  # warm-up
        for _ in range(args.rounds):
            ours.append(fit(root, runs))
            bare.append(loop(root, runs, args.steps))
            print(f"fit {ours[-1]:.2f} s, loop {bare[-1]:.2f} s", flush=True)
    ratios = sorted(a / b for a, b in zip(ours, bare, strict=True))
    step = statistics.median(bare) / args.steps * 1000
    overhead = statistics.median(ratios) - 1
    low, high = ratios[0] - 1, ratios[-1] - 1
    figure = (
        f"Of the steps alone, without set-up, validation and saves: overhead {overhead:.1%} (rounds {low:.1%} to "
        f"{high:.1%}); a step takes {step:.0f} ms."
    )
    if high - low > DOUBTFUL:
        figure += " The rounds differ by so much that this settles nothing: the machine was not quiet."
    write_section("What fit costs beside a bare loop", [heading, "", figure])


if __name__ == "__main__":
    main()
