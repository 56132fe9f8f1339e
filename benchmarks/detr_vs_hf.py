"""DETR's training step and inference beside Hugging Face's DETR, interleaved in one process.

    python benchmarks/detr_vs_hf.py [--rounds 7]

Each row is the ratio of medians, Hugging Face's time over ours: more than 1 is faster than Hugging Face. Both have the
same backbone of timm with the same weights, as many trained parameters, the same dropout, images of 512 × 512 pixels
with seven boxes each, the losses of every decoder layer, gradients clipped at 0.1 and the same optimizer (fused AdamW).
Hugging Face's model runs in whichever form is the fastest for the work at hand: fused or plain attention, convolutions
in channels-last order or not. About five minutes on two otherwise idle cores.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import torch
from report import origin, write_section
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, TimmBackboneConfig
from vit_vs_timm import measure

from multimodal.models.detr import DETR, DETRConfig, DETROutput
from tasks.detr.criterion import SetCriterion
from tasks.detr.matcher import HungarianMatcher, Targets

SIDE = 512
OBJECTS = 7  # COCO has 7.3 an image
MODELS = {"R50, 6 + 6 layers": ("resnet50", 6), "EfficientNet-Lite0, 3 + 3 layers": ("tf_efficientnet_lite0", 3)}
FROZEN = {"resnet50": ("conv1", "bn1", "layer1"), "tf_efficientnet_lite0": ()}
"""Parts of a backbone that are not trained: those of the original code and of Hugging Face's ResNets."""
ORDERS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
Step = Callable[[], None]


def build(backbone: str, depth: int) -> tuple[DETR, DetrForObjectDetection]:
    """Ours and theirs, with equal weights in the backbone."""
    config = DETRConfig(backbone=backbone)
    encoder, decoder = (replace(each, depth=depth) for each in (config.encoder, config.decoder))
    ours = DETR(replace(config, encoder=encoder, decoder=decoder))
    theirs = DetrForObjectDetection(
        DetrConfig(
            # Frozen by timm: their own way to freeze the norms leaves out the activations that timm has within them.
            backbone_config=TimmBackboneConfig(backbone=backbone, out_indices=[-1], freeze_batch_norm_2d=True),
            num_labels=config.num_classes,
            encoder_layers=depth,
            decoder_layers=depth,
            activation_dropout=config.encoder.mlp_dropout,  # as in the original; theirs has none by default
            auxiliary_loss=True,
        )
    )
    theirs.model.backbone.model.load_state_dict(ours.backbone.net.state_dict())
    for net, part in product((ours.backbone.net, theirs.model.backbone.model), FROZEN[backbone]):
        net.get_submodule(part).requires_grad_(False)
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (ours, theirs)]
    if counts[0] != counts[1]:
        raise RuntimeError(f"{backbone}: {counts[0]} trained parameters here, {counts[1]} in Hugging Face's")
    return ours, theirs


def examples(batch: int) -> tuple[Tensor, Targets]:
    images = torch.randn(batch, 3, SIDE, SIDE)
    centre, sides = torch.rand(batch, OBJECTS, 2) * 0.6 + 0.2, torch.rand(batch, OBJECTS, 2) * 0.3 + 0.05
    labels = torch.randint(91, (batch, OBJECTS))
    return images, Targets(labels, torch.cat([centre, sides], -1), torch.zeros(batch, OBJECTS, dtype=torch.bool))


def train_step(model: nn.Module, images: Tensor, targets: Targets, dtype: torch.dtype) -> Step:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    matcher, criterion = HungarianMatcher(), SetCriterion()
    labels = [{"class_labels": c, "boxes": b} for c, b in zip(targets.labels, targets.boxes, strict=True)]

    def loss_of() -> Tensor:
        if not isinstance(model, DETR):
            loss: Tensor = model(images, labels=labels).loss
            return loss
        found = model(images, all_layers=True)
        output = DETROutput(found.logits, found.boxes)
        return criterion.total(criterion(output, targets, matcher(output, targets)))

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.1)
        optimizer.step()
        if not loss.isfinite():
            raise RuntimeError(f"the loss of {type(model).__name__} is {loss.item()}")

    return step


def inference(model: nn.Module, images: Tensor, _: Targets, dtype: torch.dtype) -> Step:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model(images)

    return step


def fastest(
    model: DetrForObjectDetection, make: Callable[[nn.Module, Tensor], Step], images: Tensor
) -> tuple[Step, str]:
    """The work in their fastest form, and which that is, by two runs of each."""

    def prepare(attention: str, order: str) -> Step:
        model.set_attn_implementation(attention)
        return make(model.to(memory_format=ORDERS[order]), images.contiguous(memory_format=ORDERS[order]))

    times: dict[tuple[str, str], float] = {}
    for form in product(("sdpa", "eager"), ORDERS):
        step = prepare(*form)
        step()
        for _ in range(2):
            start = time.perf_counter()
            step()
            times[form] = min(times.get(form, float("inf")), time.perf_counter() - start)
    best = min(times, key=times.__getitem__)
    return prepare(*best), ", ".join(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    heading = origin("transformers", "timm")
    works = (("train", train_step, 2), ("inference", inference, 1), ("inference", inference, 2))
    rows = [
        "| model | work, batch | dtype | ours, ms | HF, ms | HF / ours | range of rounds | HF's form |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (backbone, depth) in MODELS.items():
        ours, theirs = build(backbone, depth)
        count = sum(p.numel() for p in ours.parameters()) / 1e6
        for dtype, (work, make, batch) in product((torch.float32, torch.bfloat16), works):
            images, targets = examples(batch)

            def run(model: nn.Module, images: Tensor) -> Step:
                return make(model, images, targets, dtype)  # noqa: B023

            their_step, form = fastest(theirs, run, images)
            row = measure(run(ours, images), their_step, args.rounds)
            rows.append(
                f"| {name}, {count:.1f} M | {work}, {batch} | {str(dtype).removeprefix('torch.')} "
                f"| {row.ours:.0f} | {row.theirs:.0f} | **{row.theirs / row.ours:.2f}** | {row.low:.2f}–{row.high:.2f} "
                f"| {form} |"
            )
            print(rows[-1], flush=True)
    write_section("DETR beside Hugging Face", [heading, "", *(__doc__ or "").split("\n\n")[2].splitlines(), "", *rows])


if __name__ == "__main__":
    main()
