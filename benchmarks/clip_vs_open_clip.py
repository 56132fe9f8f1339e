"""CLIP's training step and encoding beside open_clip's ViT-B/32, interleaved in one process.

    python benchmarks/clip_vs_open_clip.py [--rounds 7]

Each row is the ratio of medians, open_clip's time over ours: more than 1 is faster than open_clip. Both have the same
weights, batches of 16 images of 224 × 224 pixels with a caption each, the same loss and the same optimizer (fused
AdamW). Captions are those of drawn scenes, which open_clip's tokenizer pads to 77 tokens and ours to the longest of the
batch, or texts that have all of the 77. open_clip's attention is fused or plain, whichever is faster for the work at
hand.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import open_clip
import torch
from report import origin, write_section
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from vit_vs_timm import measure

from multimodal import pretrained
from multimodal.data.scenes import draw_scene
from multimodal.data.text import CLIPTokenizer
from multimodal.models.clip import CLIP
from tasks.clip.losses import contrastive_loss

BATCH = 16
ATTENTION = {"fused": nullcontext, "plain": partial(sdpa_kernel, SDPBackend.MATH)}
Step = Callable[[], None]


def texts() -> dict[str, tuple[Tensor, Tensor]]:
    """Tokens for ours and for theirs, by what they are."""
    captions = [draw_scene(0, index, objects=(1, 3)).caption for index in range(BATCH)]
    ours, theirs = CLIPTokenizer(77)(captions), open_clip.tokenize(captions)
    mean = (ours != 0).sum() / BATCH
    full = open_clip.tokenize(["circle " * 80] * BATCH)
    return {f"captions of {mean:.0f} tokens": (ours, theirs), "texts of 77 tokens": (full, full)}


def loss_of(model: nn.Module, images: Tensor, tokens: Tensor) -> Tensor:
    found: Any = model(images, tokens)
    if isinstance(model, CLIP):
        return contrastive_loss(found.image_features, found.text_features, found.logit_scale)
    loss: Tensor = open_clip.loss.ClipLoss()(*found)
    return loss


def train_step(model: nn.Module, images: Tensor, tokens: Tensor, dtype: torch.dtype) -> Step:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of(model, images, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def encoding(part: str, model: nn.Module, images: Tensor, tokens: Tensor, dtype: torch.dtype) -> Step:
    model.eval()
    encode: Any = getattr(model, f"encode_{part}")
    inputs = images if part == "image" else tokens

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            encode(inputs)

    return step


def within(make: Callable[[], AbstractContextManager[Any]], step: Step) -> Step:
    def run() -> None:
        with make():
            step()

    return run


def fastest(step: Step) -> tuple[Step, str]:
    """The work with the faster attention, and which that is, by two runs of each."""
    times = {}
    for name, make in ATTENTION.items():
        run = within(make, step)
        run()
        start = time.perf_counter()
        run(), run()
        times[name] = time.perf_counter() - start
    best = min(times, key=times.__getitem__)
    return within(ATTENTION[best], step), best


def works() -> Iterable[tuple[str, Callable[..., Step], str]]:
    for kind in texts():
        yield f"training step, {kind}", train_step, kind
        yield f"encode_text, {kind}", partial(encoding, "text"), kind
    yield "encode_image", partial(encoding, "image"), kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    heading = origin("open-clip-torch")
    theirs = open_clip.create_model("ViT-B-32")
    ours = pretrained.load(theirs).model
    images, tokens = torch.randn(BATCH, 3, 224, 224), texts()
    rows = [
        "| work | dtype | ours, ms | open_clip, ms | open_clip / ours | range of rounds | open_clip's attention |",
        "|---|---|---|---|---|---|---|",
    ]
    for (work, make, kind), dtype in product(works(), (torch.float32, torch.bfloat16)):
        their_step, form = fastest(make(theirs, images, tokens[kind][1], dtype))
        row = measure(make(ours, images, tokens[kind][0], dtype), their_step, args.rounds)
        rows.append(
            f"| {work} | {str(dtype).removeprefix('torch.')} | {row.ours:.0f} | {row.theirs:.0f} "
            f"| **{row.theirs / row.ours:.2f}** | {row.low:.2f}–{row.high:.2f} | {form} |"
        )
        print(rows[-1], flush=True)
    text = (__doc__ or "").split("\n\n")[2].splitlines()
    write_section("CLIP beside open_clip", [heading, "", *text, "", *rows])


if __name__ == "__main__":
    main()
