"""A Linear and its activation, fused against plain: the measurements behind `_RULES` in multimodal/linear.py.

    python benchmarks/linear.py

Interleaved rounds in one process, medians; under a minute on two cores.
"""

import time
from statistics import median

import torch
import torch.nn.functional as F
from report import origin, write_section

SHAPES = ((192, 192), (384, 1536), (768, 3072))
ROWS = (1, 16, 128, 1576)


@torch.inference_mode()
def gains(rows: int, width: int, out: int, dtype: torch.dtype) -> tuple[float, float]:
    """Plain time over fused time, without an activation and with GELU."""
    x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(out, width, dtype=dtype)
    bias = torch.randn(out, dtype=dtype)
    fused = torch.ops.mkldnn._linear_pointwise
    calls = {
        "plain": lambda: F.linear(x, weight, bias),
        "fused": lambda: fused(x, weight, bias, "none", [], ""),
        "plain gelu": lambda: F.gelu(F.linear(x, weight, bias)),
        "fused gelu": lambda: fused(x, weight, bias, "gelu", [], "none"),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(40):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    middle = {name: median(taken[5:]) for name, taken in times.items()}
    return middle["plain"] / middle["fused"], middle["plain gelu"] / middle["fused gelu"]


def main() -> None:
    torch.manual_seed(0)
    heading = origin()
    lines = ["| dtype | Linear | rows | Linear alone | with GELU |", "|---|---|---|---|---|"]
    for dtype in (torch.bfloat16, torch.float32):
        for width, out in SHAPES:
            for rows in ROWS:
                alone, gelu = gains(rows, width, out, dtype)
                kind = str(dtype).removeprefix("torch.")
                lines.append(f"| {kind} | {width} × {out} | {rows} | {alone:.2f}× | {gelu:.2f}× |")
    write_section("A Linear and its activation in one call", [heading, "", "Plain time over fused time.", "", *lines])


if __name__ == "__main__":
    main()
