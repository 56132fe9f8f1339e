"""`multimodal fit clip` against open_clip's model and loss in a plain loop: the same losses, step by step."""

from pathlib import Path

import numpy as np
import open_clip
import torch
import yaml
from PIL import Image
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tasks.cli import main
from tasks.clip.data import CaptionData
from tasks.optim import parameter_groups, warmup_cosine
from tasks.run import read_metrics
from tests.tasks.commands import QUIET, ROOT

RECIPE = ROOT / "configs" / "clip_emoji.yaml"
EPOCHS, BATCH, SIDE, WIDTH, LENGTH = 2, 8, 16, 64, 12


def captioned(root: Path) -> Path:
    root.mkdir()
    rows = ["file\tcaption"]
    for number in range(32):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        rows.append(f"{number}.png\tthing {number}")
    (root / "captions.tsv").write_text("\n".join(rows) + "\n")
    return root


def test_the_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    root, init = captioned(tmp_path / "things"), tmp_path / "init.pt"
    vision = open_clip.CLIPVisionCfg(layers=2, width=WIDTH, patch_size=8, image_size=SIDE)
    text = open_clip.CLIPTextCfg(layers=2, width=WIDTH, heads=1, context_length=LENGTH)
    model, loss_of = open_clip.CLIP(WIDTH, vision, text), open_clip.loss.ClipLoss()
    torch.save(model.state_dict(), init)
    recipe = yaml.safe_load(RECIPE.read_text())
    options = recipe["model"]
    data = CaptionData(
        root=str(root), seed=3, image_size=SIDE, context_length=LENGTH, **(recipe["data"] | {"batch_size": BATCH})
    )
    data.setup("fit")
    train = data.train_dataloader()
    groups = parameter_groups(model, lr=options["lr"], weight_decay=options["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=options["lr"], betas=options["betas"])
    schedule = LambdaLR(optimizer, warmup_cosine(EPOCHS * len(train), options["warmup"]))
    theirs = []
    for epoch in range(EPOCHS):
        train.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in train:
            padded = nn.functional.pad(batch["tokens"], (0, LENGTH - batch["tokens"].shape[1]))
            loss = loss_of(*model(batch["image"], padded))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe["trainer"]["gradient_clip_val"])
            optimizer.step()
            schedule.step()
            theirs.append(loss.item())

    flags = {"data.root": root, "init": init, "seed_everything": 3, "trainer.default_root_dir": tmp_path}
    flags |= {"trainer.max_epochs": EPOCHS, "trainer.precision": "32-true", "trainer.log_every_n_steps": 1}
    flags |= {"data.batch_size": BATCH, "model.embed_dim": WIDTH, "model.text.context_length": LENGTH}
    flags |= {f"model.{tower}.embed_dim": WIDTH for tower in ("vision", "text")}
    flags |= {f"model.{tower}.num_heads": 1 for tower in ("vision", "text")}
    flags |= {f"model.{tower}.depth": 2 for tower in ("vision", "text")} | {"model.vision.image_size": SIDE}
    told = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    assert main(["fit", "clip", "--config", str(RECIPE), *QUIET, *told]) == 0
    (run,) = (tmp_path / "clip").iterdir()
    ours = [row["train/loss_step"] for row in read_metrics(run) if "train/loss_step" in row]
    assert len(ours) == len(theirs) > EPOCHS * 2
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
