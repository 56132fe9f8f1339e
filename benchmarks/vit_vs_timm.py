"""ViT training step and inference beside timm's module of the same size, interleaved in one process.

    python benchmarks/vit_vs_timm.py [--rounds 7] [--json FILE]

Each row is the ratio of medians, timm's time over ours: more than 1 is faster than timm. Both models have the same
weights, the same batch and the same optimizer (fused AdamW); timm runs as its users run it (fused attention).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
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


def measure(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> dict[str, float | list[float]]:
    """Interleaved rounds after one warm-up of each; who goes first alternates."""
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    ours(), theirs()
    for i in range(rounds):
        for run in (ours, theirs) if i % 2 else (theirs, ours):
            start = time.perf_counter()
            run()
            times[run].append(time.perf_counter() - start)
    ratios = sorted(b / a for a, b in zip(times[ours], times[theirs], strict=True))
    return {
        "ours_ms": 1000 * statistics.median(times[ours]),
        "timm_ms": 1000 * statistics.median(times[theirs]),
        "ratio": statistics.median(times[theirs]) / statistics.median(times[ours]),
        "range": [ratios[0], ratios[-1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    print(
        "| size | work | dtype | ours, ms | timm, ms | timm / ours | range of rounds |\n|---|---|---|---|---|---|---|"
    )
    for size, name in (("Ti", "vit_tiny_patch16_224"), ("S", "vit_small_patch16_224")):
        for work, make in (("train", train_step), ("inference", inference)):
            for dtype in (torch.float32, torch.bfloat16):
                ours, theirs = ViT(ViTConfig(**SIZES[size])), timm.create_model(name)
                counts = [sum(p.numel() for p in m.parameters()) for m in (ours, theirs)]
                if counts[0] != counts[1]:
                    raise RuntimeError(f"{name}: {counts[0]} parameters here, {counts[1]} in timm")
                row = measure(make(ours, dtype), make(theirs, dtype), args.rounds)
                kind = str(dtype).removeprefix("torch.")
                rows.append({"size": size, "work": work, "batch": BATCH[work], "dtype": kind, **row})
                low, high = row["range"]
                print(
                    f"| {size} | {work}, batch {BATCH[work]} | {kind} | {row['ours_ms']:.0f} | {row['timm_ms']:.0f} "
                    f"| {row['ratio']:.2f} | {low:.2f}–{high:.2f} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
