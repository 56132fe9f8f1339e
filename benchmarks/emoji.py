"""Captioned emoji: configs/clip_emoji.yaml beside open_clip's own model in a plain loop.

    python benchmarks/emoji.py --which ours --seed 0 --root EMOJI    # one run, kept in runs/emoji
    python benchmarks/emoji.py                                       # the section, from all runs there

`ours` (the command line) and `open_clip` (a loop written out below) have the same size, images, captions, order of
images, loss, optimizer, schedule and steps, on one thread, so that two can run at a time. `float32` is `ours` without
bfloat16: from the same weights, both programs then have the same losses (tests/parity/test_open_clip_training.py).
`recipe` is `ours` with stronger augmentation, for twice the epochs. EMOJI holds captions.tsv and the drawings of
twitter/, nine tenths of whose captions are trained on, and of google/.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import open_clip
import torch
import yaml
from report import origin, write_section
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from multimodal import pretrained
from tasks.clip.data import CaptionData
from tasks.clip.metrics import TOP, Retrieval
from tasks.clip.table import TableOptions
from tasks.optim import parameter_groups, warmup_cosine

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "clip_emoji.yaml"
TRAINED = "twitter/*"
SETS = (("twitter", "unseen"), ("google", "seen"), ("google", "unseen"))
"""Drawings and captions to measure on."""
WAYS = ("image_to_text", "text_to_image")
RECIPE = {
    "trainer.max_epochs": "60",
    "data.augment.crop_scale": "[0.5, 1.0]",
    "data.augment.rotation": "15",
    "data.augment.color_jitter": "0.4",
}
"""What drawings of another style are recognised by."""
Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def data_of(config: dict[str, Any], root: str, seed: int, table: TableOptions) -> CaptionData:
    side, length = config["model"]["vision"]["image_size"], config["model"]["text"]["context_length"]
    return CaptionData(root=root, table=table, image_size=side, context_length=length, seed=seed, **config["data"])


@torch.inference_mode()
def recalls(encode: Encode, config: dict[str, Any], root: str) -> dict[str, float]:
    """R@k of each set, both ways, in percent."""
    found = {}
    for drawings, captions in SETS:
        data = data_of(config, root, 0, TableOptions(files=f"{drawings}/*", test_on=captions))
        data.setup("test")
        metric = Retrieval(config["model"]["embed_dim"])
        for batch in data.test_dataloader():
            images, texts, scale = encode(batch["image"], batch["tokens"])
            metric.update(images, batch["image_id"], texts, batch["caption_id"], batch["caption_of"], scale)
        values = metric.compute()
        found |= {
            f"{drawings}, {captions}, {way}, R@{k}": 100 * float(values[f"{way}/R{k}"]) for way in WAYS for k in TOP
        }
    return found


def ours(root: str, seed: int, more: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The command line on the configuration, with more flags; what its last weights find."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"data.root": root, "data.table.files": TRAINED, "seed_everything": str(seed)}
        flags |= {"trainer.default_root_dir": folder, "trainer.enable_progress_bar": "false", **more}
        arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
        command = [sys.executable, "-m", "tasks.cli", "fit", "clip", "--config", str(CONFIG), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        (run,) = (Path(folder) / "clip").iterdir()
        model = pretrained.load(run / "checkpoints" / "last.ckpt", task="clip").model.eval()
    found = recalls(lambda *inputs: model(*inputs)[:3], yaml.safe_load(CONFIG.read_text()), root)
    return {"recalls": found, "seconds": spent.ru_utime + spent.ru_stime}


def build(config: dict[str, Any]) -> nn.Module:
    """open_clip's model of that size."""
    model = config["model"]
    vision = {"layers": model["vision"]["depth"], "width": model["vision"]["embed_dim"], "head_width": 64}
    vision |= {name: model["vision"][name] for name in ("patch_size", "image_size")}
    text = {"layers": model["text"]["depth"], "width": model["text"]["embed_dim"], "heads": model["text"]["num_heads"]}
    text["context_length"] = model["text"]["context_length"]
    return open_clip.CLIP(model["embed_dim"], open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text))


def plain_loop(root: str, seed: int) -> dict[str, Any]:
    """open_clip's model and loss in a loop as anybody would write it."""
    config = yaml.safe_load(CONFIG.read_text())
    options, epochs = config["model"], config["trainer"]["max_epochs"]
    torch.manual_seed(seed)
    data = data_of(config, root, seed, TableOptions(files=TRAINED))
    data.setup("fit")
    train, model, loss_of = data.train_dataloader(), build(config), open_clip.loss.ClipLoss()

    def run(images: Tensor, tokens: Tensor) -> Any:
        return model(images, nn.functional.pad(tokens, (0, options["text"]["context_length"] - tokens.shape[1])))

    groups = parameter_groups(model, lr=options["lr"], weight_decay=options["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=options["lr"], betas=options["betas"], fused=True)
    schedule = LambdaLR(optimizer, warmup_cosine(epochs * len(train), options["warmup"]))
    start = time.process_time()
    for epoch in range(epochs):
        train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in train:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(*run(batch["image"], batch["tokens"]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["trainer"]["gradient_clip_val"])
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)  # type: ignore[operator]
        print(f"epoch {epoch}: {loss.item():.3f}", flush=True)
    seconds = time.process_time() - start
    model.eval()
    return {"recalls": recalls(lambda *inputs: run(*inputs)[:3], config, root), "seconds": seconds}


def report(out: Path) -> None:
    runs = {which: [json.loads(path.read_text()) for path in sorted(out.glob(f"{which}-*.json"))] for which in RUNS}
    runs = {which: each for which, each in runs.items() if each}
    rows = [f"| drawings and captions | way | R@k | {' | '.join(runs)} |", f"|{'---|' * (3 + len(runs))}"]
    for name in runs["ours"][0]["recalls"]:
        cells = []
        for each in runs.values():
            values = [run["recalls"][name] for run in each]
            spread = f" ± {statistics.stdev(values):.1f}" if values[1:] else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        drawings, captions, way, k = name.split(", ")
        rows.append(f"| {drawings}, {captions} | {way.replace('_', ' ')} | {k} | {' | '.join(cells)} |")
    seconds = ", ".join(f"{which} {min(run['seconds'] for run in each):.0f}" for which, each in runs.items())
    counts = ", ".join(f"{which} {len(each)}" for which, each in runs.items())
    about = f"Percent, means and standard deviations over seeds ({counts}). Least seconds of one thread: {seconds}."
    write_section("CLIP on emoji beside open_clip", [origin("open-clip-torch"), "", about, "", *rows])


RUNS = {
    "ours": ours,
    "open_clip": plain_loop,
    "float32": partial(ours, more={"trainer.precision": "32-true"}),
    "recipe": partial(ours, more=RECIPE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--which", choices=RUNS, help="what to run; without it: the section")
    parser.add_argument("--root", help="the data: captions.tsv, twitter/ and google/")
    parser.add_argument("--out", type=Path, default=Path("runs/emoji"), help="a folder for the results of the runs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.which is None:
        report(args.out)
        return
    if args.root is None:
        parser.error("a run needs --root")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    result = RUNS[args.which](args.root, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.which}-{args.seed}.json").write_text(json.dumps(result))
    print(args.which, args.seed, result)


if __name__ == "__main__":
    main()
