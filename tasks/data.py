"""What the data modules of all tasks share: the order of the samples, their split, and the loaders."""

import itertools
import os
import signal
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from numpy.typing import NDArray
from pytorch_lightning import LightningDataModule
from pytorch_lightning.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, Sampler

Sample = TypeVar("Sample")
Key = tuple[int, int] | tuple[int, int, int]
"""Epoch, index and, with repeated augmentation, which repeat: what a dataset is asked for, so that augmentation can
differ each time."""
Shuffle = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Makes a random order of all samples for an epoch."""
Split = Callable[[Sequence[Any], Sequence[float], int], list[list[int]]]
"""Groups of samples, shares to hold out and a seed, to the indices of what remains and of each share, ascending."""


def run_seed() -> int:
    """The seed of the run (seed_everything), the same in all of its processes."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


class EpochSampler(Sampler[Key]):
    """The order of one epoch, as a function of (seed, epoch), dealt out to the processes in turn.

    In training the order is random and each process gets equally many samples: what does not divide is left out, other
    samples in each epoch. In evaluation each sample comes once over all processes, in order.

    Args:
        length: number of samples in the data set.
        training: random order and equal shares.
        seed: with the epoch it decides the order.
        rank: which of the processes this is.
        world_size: number of processes.
        repeats: how often a sample comes in a training epoch, in a row, so that the processes get its repeats in turn;
            the epoch's length stays, with fewer samples in it ("Augment Your Batch", Hoffer et al. 2020, as in DeiT).
        shuffle: a random order of the samples, int64 [length], from a generator and the epoch; None = any order is as
            likely.
    """

    def __init__(
        self,
        length: int,
        *,
        training: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
        shuffle: Shuffle | None = None,
    ) -> None:
        if training and length < world_size:
            raise ValueError(f"{length} training samples for {world_size} processes: expected at least one each")
        if training and repeats > length:
            raise ValueError(f"repeated_augmentation is {repeats}, expected at most the {length} training samples")
        self.length = length
        self.training = training
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.repeats = repeats
        self.shuffle = shuffle
        self.epoch = 0
        self._done = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning before each epoch."""
        self.epoch = epoch

    def leave_out(self, epoch: int, samples: int) -> None:
        """Begin that epoch behind its first samples."""
        self._done = (epoch, samples)

    def __iter__(self) -> Iterator[Key]:
        epoch, samples = self._done
        return itertools.islice(self._keys(), samples if epoch == self.epoch else 0, None)

    def _keys(self) -> Iterator[Key]:
        if not self.training:
            return ((self.epoch, index) for index in range(self.rank, self.length, self.world_size))
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.length) if self.shuffle is None else self.shuffle(rng, self.epoch)
        mine = range(self.rank, self.length - self.length % self.world_size, self.world_size)
        if self.repeats == 1:
            return ((self.epoch, int(order[at])) for at in mine)
        return ((self.epoch, int(order[at // self.repeats]), at % self.repeats) for at in mine)

    def __len__(self) -> int:
        if self.training:
            return self.length // self.world_size
        return len(range(self.rank, self.length, self.world_size))


class EpochLoader(DataLoader[Any]):
    """A loader that starts an epoch when its first batch is asked for, and can start it in the middle.

    Lightning makes the iterator of a resumed run's first epoch before it tells the sampler which epoch that is.
    """

    def state_dict(self) -> dict[str, Any]:
        """What decides which samples are in a batch; `tasks.checkpoints.settle` adds which batches are done."""
        sampler = self.sampler
        names = ("seed", "world_size", "repeats") if isinstance(sampler, EpochSampler) else ()
        order = {name: getattr(sampler, name) for name in names}
        data = getattr(self.dataset, "fingerprint", None)
        return {"samples": len(self.dataset), "data": data, "batch_size": self.batch_size, **order}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start `epoch` behind the `batches` that are done; ValueError where these were other ones than now."""
        for name, now in self.state_dict().items():
            if state["batches"] and state.get(name) != now:
                raise ValueError(
                    f"the run was saved behind batch {state['batches']} of an epoch, with {name} {state.get(name)}; "
                    f"now it is {now}, expected the same until that epoch ends"
                )
        if isinstance(self.sampler, EpochSampler):
            self.sampler.leave_out(state["epoch"], state["batches"] * state["batch_size"])
            if state["data"] != self.state_dict()["data"]:
                rank_zero_warn("the training data, or their split, are not those that the run has had so far")
        elif state["batches"]:
            raise ValueError("with trainer.overfit_batches a run cannot go on from the middle of an epoch")

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        except ValueError as error:
            # A worker's error arrives as a whole traceback; its last line is what the dataset said.
            if "in DataLoader worker process" not in str(error):
                raise
            raise ValueError(str(error).rstrip().rpartition("\n")[2].removeprefix("ValueError: ")) from None

    def __len__(self) -> int:
        """Batches; 1 also where a process has none, which Lightning would leave out of the end of an evaluation.

        The others would then wait there for it, to put their metrics together.
        """
        return max(1, super().__len__())


def outlive_signals(worker: int) -> None:
    """In a loader's worker: leave Ctrl-C to the run, which still needs batches until it stops, and SIGTERM once."""

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, once)


class TaskData(LightningDataModule):
    """Loaders over `self.datasets`, which a task's data module fills in `setup` under train, val and test.

    Args:
        batch_size: Samples a batch, on each process.
        num_workers: Processes that prepare batches; None = none where that is quick (embedded data), else one a spare
            core, up to 8.
        seed: Decides the order of the samples and their augmentation; None = that of the run (seed_everything).
        repeated_augmentation: How often an image comes in a training epoch, each time augmented anew; the epoch keeps
            its length and has the fewer images.
        split_seed: Decides which samples are held out, where the data come without a split.
        val_fraction: Share of each class that is held out for validation, where the data come without that split.
        test_fraction: Share of each class that is held out for testing, where the data come without that split.
    """

    in_memory = False
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of items; None = tensors of equal sizes are stacked."""

    def __init__(
        self,
        *,
        batch_size: int = 64,
        num_workers: int | None = None,
        seed: int | None = None,
        repeated_augmentation: int = 1,
        split_seed: int = 0,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        for name, value in (("seed", seed), ("split_seed", split_seed)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}, expected at least 0")
        if repeated_augmentation < 1:
            raise ValueError(f"repeated_augmentation is {repeated_augmentation}, expected at least 1")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}, expected at least 0")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction is {val_fraction}, expected a share above 0 and below 1")
        if not 0 <= test_fraction < 1 - val_fraction:
            raise ValueError(f"test_fraction is {test_fraction}, expected a share from 0 to below 1 - val_fraction")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = run_seed() if seed is None else seed
        self.repeated_augmentation = repeated_augmentation
        self.split_seed = split_seed
        self.val_fraction = val_fraction
        self.test_fraction = test_fraction
        self.datasets: dict[str, Dataset[Any]] = {}
        # With fewer samples than processes an evaluation leaves some of them without any.
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def complete(
        self,
        found: Mapping[str, Sequence[Sample]],
        group: Callable[[Sample], Hashable],
        split: Split | None = None,
    ) -> dict[str, Sequence[Sample]]:
        """Samples for train, val and test: splits that the data lack are held out of train.

        Data with val but without test are tested on val.

        Args:
            found: the samples of each split that the data have.
            group: what a sample belongs to.
            split: how samples are held out, by their groups; None = a share of each group, see `stratified_split`.
        """
        missing = [] if "val" in found else ["val"]
        if "test" not in found and "val" not in found:
            missing.append("test")
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        train = found.get("train", [])
        divide = split or stratified_split
        parts = divide([group(sample) for sample in train], [shares[name] for name in missing], self.split_seed)
        chosen = [[train[index] for index in part] for part in parts]
        splits: dict[str, Sequence[Sample]] = {**found, **dict(zip(["train", *missing], chosen, strict=True))}
        if not splits.get("test"):
            splits["test"] = splits["val"]
        return splits

    def train_dataloader(self) -> EpochLoader:
        return self._loader("train")

    def val_dataloader(self) -> EpochLoader:
        return self._loader("val")

    def test_dataloader(self) -> EpochLoader:
        return self._loader("test")

    def _loader(self, split: str) -> EpochLoader:
        dataset = self.datasets[split]
        share = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"rank": 0, "num_replicas": 1}
        sampler = EpochSampler(
            len(dataset),  # type: ignore[arg-type]
            training=split == "train",
            seed=self.seed,
            rank=share["rank"],
            world_size=share["num_replicas"],
            repeats=self.repeated_augmentation,
            shuffle=getattr(dataset, "shuffle", None),
        )
        workers = self._workers()
        return EpochLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            worker_init_fn=outlive_signals,
            pin_memory=torch.cuda.is_available(),
            # Its own: the global generator belongs to the model, whose dropout must not depend on the loaders.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        if self.in_memory:
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            return 0
        processes = self.trainer.num_devices if self.trainer else 1
        return min(8, suggested_max_num_workers(processes))


def stratified_split(labels: Sequence[Hashable], fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Hold out a share of each class: the indices of what remains, then of each fraction, all in ascending order.

    A fraction above 0 gets at least one sample of a class while one remains for training, earlier fractions first.
    """
    by_class: dict[Hashable, list[int]] = {}
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for position, members in enumerate(by_class.values()):
        members = list(np.random.default_rng((seed, position)).permutation(members))
        count = len(members)
        for part, fraction in zip(parts[1:], fractions, strict=True):
            wanted = max(1, int(count * fraction + 0.5)) if fraction > 0 else 0
            for _ in range(min(wanted, len(members) - 1)):
                part.append(int(members.pop()))
        parts[0] += map(int, members)
    return [sorted(part) for part in parts]
