"""Plain against fused attention: the measurements behind `PLAIN_UP_TO` in multimodal/attention/kernels/auto.py.

    python benchmarks/attention_kernels.py [--device cpu]

Both kernels run in turn in one process, on the strided queries, keys and values that projections give; a cell is the
median over its rounds. About three minutes on two CPU cores.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from report import DOCS, origin

from multimodal.attention.kernels import build_kernel

LENGTHS = (50, 100, 197, 256, 384, 512, 768, 1024, 1536, 2048)
HEADS = (3, 12)
HEAD_DIM = 64
TOKENS = 2048
"""Tokens in a batch, so that the batch shrinks as the length grows."""
DTYPES = (torch.float32, torch.bfloat16)
TIE = 1.1
"""Less is a tie, and a tie goes to the fused kernel, which needs less memory."""


@dataclass(frozen=True)
class Cell:
    """Median milliseconds of both kernels at one size."""

    plain: float
    fused: float

    @property
    def gain(self) -> float:
        """How many times faster the plain kernel is."""
        return self.fused / self.plain


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def milliseconds(call: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def measure(
    length: int, heads: int, dtype: torch.dtype, device: torch.device, *, training: bool, seconds: float
) -> Cell:
    """Time both kernels in turn for about `seconds`, at least five rounds after a first that is dropped."""
    batch = max(1, TOKENS // length)
    q, k, v = (
        torch.randn(batch, length, heads, HEAD_DIM, device=device, dtype=dtype).transpose(1, 2).requires_grad_(training)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)
    kernels = {name: build_kernel(name) for name in ("naive", "sdpa")}

    def run(name: str) -> None:
        with torch.set_grad_enabled(training):
            out = kernels[name](q, k, v, scale=HEAD_DIM**-0.5)
        if training:
            torch.autograd.grad(out, (q, k, v), gradient)

    times: dict[str, list[float]] = {name: [] for name in kernels}
    names, deadline = list(kernels), time.perf_counter() + seconds
    while len(times["naive"]) < 6 or time.perf_counter() < deadline:
        for name in names:
            times[name].append(milliseconds(lambda name=name: run(name), device))
        names.reverse()
    return Cell(median(times["naive"][1:]), median(times["sdpa"][1:]))


def crossover(cells: dict[tuple[int, int], Cell]) -> int:
    """The largest length up to which plain attention is faster at every head count; 0 = nowhere."""
    last = 0
    for length in LENGTHS:
        if min(cells[length, heads].gain for heads in HEADS) < TIE:
            break
        last = length
    return last


def table(training: dict[tuple[int, int], Cell], inference: dict[tuple[int, int], Cell]) -> list[str]:
    lines = [
        "| tokens | heads | training: plain ms | fused ms | plain is faster by | inference: plain ms | fused ms | by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (length, heads), train in training.items():
        infer = inference[length, heads]
        lines.append(
            f"| {length} | {heads} | {train.plain:.2f} | {train.fused:.2f} | {train.gain:.2f}× "
            f"| {infer.plain:.2f} | {infer.fused:.2f} | {infer.gain:.2f}× |"
        )
    return lines


def report(device: torch.device, seconds: float) -> str:
    """The whole page; a line per cell goes to the screen meanwhile."""
    lines = [
        f"# Plain against fused attention on {device.type}",
        "",
        origin(device=device),
        "",
        f"Self-attention without a mask, heads of {HEAD_DIM}, batches of about {TOKENS} tokens, medians of interleaved",
        "rounds. Training is forward and backward. Plain is the kernel `naive`, fused is `sdpa`; `auto` chooses by the",
        f"first table. Less than {TIE:.1f}× counts for the fused kernel, which needs less memory.",
    ]
    crossovers = ["", "| dtype | training: plain up to | inference: plain up to |", "|---|---|---|"]
    tables: list[str] = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        cells: dict[bool, dict[tuple[int, int], Cell]] = {True: {}, False: {}}
        for length in LENGTHS:
            for heads in HEADS:
                for training in (True, False):
                    cell = measure(length, heads, dtype, device, training=training, seconds=seconds)
                    cells[training][length, heads] = cell
                print(
                    f"{name} {length} tokens, {heads} heads: {cells[True][length, heads].gain:.2f}× in training",
                    file=sys.stderr,
                )
        limits = [crossover(cells[training]) or "never" for training in (True, False)]
        crossovers.append(f"| {name} | {limits[0]} | {limits[1]} |")
        tables += ["", f"## {name}", "", *table(cells[True], cells[False])]
    return "\n".join(lines + crossovers + tables) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--seconds", default=1.0, type=float, help="time for each cell, both kernels together")
    arguments = parser.parse_args()
    page = report(arguments.device, arguments.seconds)
    print(page)
    suffix = "" if arguments.device.type == "cpu" else f"_{arguments.device.type}"
    path = DOCS / f"attention_kernels{suffix}.md"
    path.write_text(page)
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
