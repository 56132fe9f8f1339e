"""What test_processes.py asks two processes: `torchrun --nproc_per_node 2 -m tests.tasks.two_processes FOLDER`.

Everything in one start of two processes, since most of its time is imports. The first writes FOLDER/results.json.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from copy import deepcopy
from functools import cache
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tasks import registry
from tasks.base import TaskModule
from tasks.cli import main
from tasks.data import Key, TaskData
from tasks.registry import Task
from tasks.trainer_cli import TaskCLI
from tests.tasks import commands
from tests.tasks.commands import DROPOUT, PLAIN, SMALL

ON_TWO = {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
SILENT = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def built(task: Task, *flags: str) -> tuple[TaskModule, TaskData]:
    """A small module of a task, and data in batches of 8."""
    return deepcopy(_parsed(task, *flags))


@cache
def _parsed(task: Task, *flags: str) -> tuple[TaskModule, TaskData]:
    small = [*PLAIN[task.name], "--data.batch_size", "8", "--trainer.fast_dev_run", "true"]
    with ExitStack() as held:
        cli = TaskCLI("fit", task, [*small, *flags], held)
    return cli.model, cli.datamodule


def gathered(value: Any) -> list[Any]:
    """The value of each process."""
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


class Recorder(Callback):
    """The weights at the start, all batches of the first step, its gradients, and what dropout left out."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.dropped: list[list[bool]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.start = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for part in pl_module.modules():
            if isinstance(part, nn.Dropout) and part.p:
                part.register_forward_hook(lambda _, __, out: self.dropped.append((out == 0).flatten()[:64].tolist()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        for name, parameter in pl_module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            self.gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


def joined(batches: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Batches as one: those that are padded to a size of their own get that of the largest."""

    def padded(name: str, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        missing = [(0, size - had) for size, had in zip(sizes, part.shape[1:], strict=True)]
        return pad(part, list(chain(*reversed(missing))), value=-1 if name == "labels" else 0)  # -1 = no class

    whole = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        sizes = [max(sides) for sides in zip(*(part.shape[1:] for part in parts), strict=True)]
        whole[name] = torch.cat([padded(name, part, sizes) for part in parts])
    return whole


def one_step(task: Task, strategy: str, accumulated: int, *flags: str) -> Recorder:
    module, data = built(task, "--model.ema_decay", "null", *flags)
    recorder = Recorder()
    options = {**ON_TWO, **SILENT, "limit_val_batches": 0, "max_steps": 1, "accumulate_grad_batches": accumulated}
    Trainer(strategy=strategy, callbacks=[recorder], **options).fit(module, data)
    return recorder


def gradient_error(task: Task, strategy: str, accumulated: int) -> float:
    """Largest difference between the gradients and those of one process on the whole batch, over max(1, largest)."""
    recorder = one_step(task, strategy, accumulated)
    module, _ = built(task)
    module.load_state_dict(recorder.start)
    for batches in zip(*gathered(recorder.batches), strict=True):
        (module.loss(joined(batches)) / accumulated).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert expected.keys() == recorder.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    error = max((expected[name] - recorder.gradients[name]).abs().max().item() for name in expected)
    return error / max(1.0, largest)


def dropped(task: Task) -> list[Any]:
    """What dropout left out in each process, twice over."""
    return [gathered(one_step(task, "ddp", 1, *DROPOUT[task.name]).dropped[0]) for _ in range(2)]


class First(Dataset[Any]):
    """The first samples of a data set, counted when they are read."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length
        self.read: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: Key) -> Any:
        self.read[key[1]] += 1
        return self.dataset[key]


def validation(task: Task, size: int) -> dict[str, Any]:
    """How often each of `size` samples is read, over all processes, and the metrics."""
    read, results = validated(task, size, strategy="ddp", **ON_TWO)
    every = sum(gathered(read), Counter())
    return {"read": [every[index] for index in range(size)], "total": every.total(), "metrics": results}


def validated(task: Task, size: int, **options: Any) -> tuple[Counter[int], dict[str, float]]:
    """How often this process reads each of `size` samples, and the metrics of an untrained model."""
    module, data = built(task, "--data.batch_size", "2")
    data.setup("fit")
    samples = data.datasets["val"] = First(data.datasets["val"], size)
    (results,) = Trainer(**SILENT, **options).validate(module, data, verbose=False)
    return samples.read, results


def runs(folder: Path) -> dict[str, Any]:
    """Whole runs, and runs that go on from each other's checkpoints, with what `validate` prints."""
    rank = dist.get_rank()
    flags = [
        *SMALL,
        *commands.TWO,
        "--model.ema_decay",
        "null",
        "--trainer.max_epochs",
        "2",
        "--trainer.default_root_dir",
    ]
    codes = {}
    for name, extra in {"ddp": [], "fsdp2": [], "bf16": ["--trainer.precision", "bf16-mixed"]}.items():
        strategy = "ddp" if name == "ddp" else "fsdp2"
        codes[name] = main(["fit", "vit", *flags, str(folder / name), "--trainer.strategy", strategy, *extra])
    (trained,) = (folder / "ddp" / "vit").iterdir()
    for name in ("ddp", "fsdp2"):
        if rank == 0:
            shutil.copytree(trained, folder / f"resumed-{name}")
        dist.barrier()
        resume = ["--resume", str(folder / f"resumed-{name}"), "--trainer.max_epochs", "3"]
        codes[f"resumed {name}"] = main(["fit", "vit", *resume, "--trainer.strategy", name])
    printed = StringIO()
    with redirect_stdout(printed):
        for strategy in ("ddp", "fsdp2"):
            two = [*commands.TWO, "--trainer.strategy", strategy]
            codes[f"validate {strategy}"] = main(
                ["validate", "vit", "--checkpoint", str(trained), *commands.QUIET, *two]
            )
    return {"codes": gathered(codes), "validated": printed.getvalue()}


def answers(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"runs": runs(folder)}
    tasks, _ = registry.discover()
    for name, task in tasks.items():
        results[name] = {
            "gradients": {
                f"{strategy} {accumulated}": gradient_error(task, strategy, accumulated)
                for strategy in ("ddp", "fsdp2")
                for accumulated in (1, 2)
            },
            "dropped": dropped(task),
            "validation": {size: validation(task, size) for size in range(1, 10)},
        }
    return results


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    found = answers(place)
    if dist.get_rank() == 0:
        (place / "results.json").write_text(json.dumps(found))
