"""ViT training step and inference beside timm's module of the same size, interleaved in one process.

    python benchmarks/vit_vs_timm.py [--rounds 15]

Each row is the ratio of medians, timm's time over ours: more than 1 is faster than timm. Both models have the same
weights, the same batch and the same optimizer (fused AdamW); timm runs as its users run it (fused attention).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import timm
import torch
from report import origin, write_section
from torch import nn

from multimodal.models.vit import SIZES, ViT, ViTConfig

BATCH = {"train": 8, "inference": 16}


def train_step(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images, labels = torch.randn(BATCH["train"], 3, 224, 224), torch.randint(1000, (BATCH["train"],))

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    model = model.eval().to(dtype)
    images = torch.randn(BATCH["inference"], 3, 224, 224, dtype=dtype)

    @torch.inference_mode()
    def step() -> None:
        model(images)

    return step


class Row(NamedTuple):
    """Median milliseconds of both, and the range of the rounds' ratios."""

    ours: float
    theirs: float
    low: float
    high: float


def measure(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> Row:
    """Interleaved rounds after one warm-up of each; who goes first alternates.

    In a round each runs twice and the second counts: the first one also pays for the memory that the other gave back.
    """
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    ours(), theirs()
    for i in range(rounds):
        for run in (ours, theirs) if i % 2 else (theirs, ours):
            run()
            start = time.perf_counter()
            run()
            times[run].append(1000 * (time.perf_counter() - start))
    ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
    return Row(statistics.median(times[ours]), statistics.median(times[theirs]), min(ratios), max(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    heading = origin("timm")
    rows = [
        "| size | work | dtype | ours, ms | timm, ms | timm / ours | range of rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, name in (("Ti", "vit_tiny_patch16_224"), ("S", "vit_small_patch16_224")):
        for work, make in (("train", train_step), ("inference", inference)):
            for dtype in (torch.float32, torch.bfloat16):
                ours, theirs = ViT(ViTConfig(**SIZES[size])), timm.create_model(name)
                counts = [sum(p.numel() for p in m.parameters()) for m in (ours, theirs)]
                if counts[0] != counts[1]:
                    raise RuntimeError(f"{name}: {counts[0]} parameters here, {counts[1]} in timm")
                row = measure(make(ours, dtype), make(theirs, dtype), args.rounds)
                rows.append(
                    f"| {size} | {work}, batch {BATCH[work]} | {str(dtype).removeprefix('torch.')} | {row.ours:.0f} "
                    f"| {row.theirs:.0f} | **{row.theirs / row.ours:.2f}** | {row.low:.2f}–{row.high:.2f} |"
                )
                print(rows[-1], flush=True)
    write_section(
        "ViT beside timm",
        [
            heading,
            "",
            f"224 × 224 pixels, equal parameter counts, medians of {args.rounds} interleaved rounds; more than 1",
            "is faster than timm. Training in bfloat16 is autocast; inference in bfloat16 has bfloat16 weights.",
            "",
            *rows,
        ],
    )


if __name__ == "__main__":
    main()
