"""How often two processes see each sample of a validation set.

    torchrun --nproc_per_node 2 benchmarks/validation_count.py

Half a minute.
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_only
from report import origin, write_section
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from tasks.data import Key, TaskData

SIZES = range(1, 10)


class Numbers(Dataset[int]):
    """0, 1, 2, …"""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Key) -> int:
        return key[1]


class Counting(LightningModule):
    """Notes every sample that it validates, and their mean as a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.mean = MeanMetric()
        self.seen: list[int] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen += batch.tolist()
        self.mean.update(batch)

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute(), sync_dist=True)


def count(size: int, **options: Any) -> tuple[list[Counter[int]], float]:
    """How often each process of this run sees each of `size` samples, and their mean by the metric."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", use_distributed_sampler=False, **quiet, **options)
    data = TaskData(batch_size=2, num_workers=0)
    data.datasets["val"] = Numbers(size)
    module = Counting()
    (results,) = trainer.validate(module, datamodule=data, verbose=False)
    every: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(every, Counter(module.seen))
    return every, results["mean"]


def main() -> None:
    heading = origin("pytorch-lightning").replace("`python ", "`torchrun --nproc_per_node 2 ")
    rows = [
        "| samples | first process | second process | seen once | mean by the metric, expected |",
        "|---|---|---|---|---|",
    ]
    for size in SIZES:
        (first, second), mean = count(size, devices=2, strategy="ddp")
        once = sum(times == 1 for times in (first + second).values())
        cells = (size, first.total(), second.total(), f"{once} of {size}", f"{mean:g}, {(size - 1) / 2:g}")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    if rank_zero_only.rank == 0:
        write_section("Validation in two processes", [heading, "", *rows])


if __name__ == "__main__":
    main()
