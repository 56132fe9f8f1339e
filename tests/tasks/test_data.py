"""The order of the samples, their shares among processes and workers, and the split."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset

from tasks.data import EpochLoader, EpochSampler, TaskData, stratified_split


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    sampler = EpochSampler(50, training=True, seed=3)
    orders = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert len(sampler) == len(keys) == 50
        assert {key[0] for key in keys} == {epoch}
        assert sorted(key[1] for key in keys) == list(range(50))
        assert keys == list(sampler)
        orders.append([key[1] for key in keys])
    assert len({tuple(order) for order in orders}) == 4
    assert [key[1] for key in EpochSampler(50, training=True, seed=4)] != orders[0]
    assert [key[1] for key in EpochSampler(50, training=True, seed=3)] == orders[0]


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_sample_is_evaluated_once(length: int, processes: int) -> None:
    shares = [EpochSampler(length, training=False, rank=rank, world_size=processes) for rank in range(processes)]
    assert Counter(index for share in shares for _, index in share) == Counter(range(length))
    assert all(len(share) == len(list(share)) for share in shares)


@pytest.mark.parametrize("length", [5, 6, 7, 20, 21])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_training_shares_are_equal_and_follow_the_order_of_one_process(length: int, processes: int) -> None:
    shares = [EpochSampler(length, training=True, rank=rank, world_size=processes) for rank in range(processes)]
    assert {len(share) for share in shares} == {length // processes}
    assert all(len(share) == len(list(share)) for share in shares)
    alone = [index for _, index in EpochSampler(length, training=True)]
    dealt = [index for step in zip(*shares, strict=True) for _, index in step]
    assert dealt == alone[: length - length % processes]


def test_what_is_left_out_changes_from_epoch_to_epoch() -> None:
    left_out = set()
    for epoch in range(20):
        shares = [EpochSampler(7, training=True, rank=rank, world_size=2) for rank in range(2)]
        for share in shares:
            share.set_epoch(epoch)
        left_out |= set(range(7)) - {index for share in shares for _, index in share}
    assert len(left_out) > 3


def test_too_few_training_samples() -> None:
    with pytest.raises(ValueError, match="repeated_augmentation is 9, expected at most the 8 training samples"):
        EpochSampler(8, training=True, repeats=9)
    with pytest.raises(ValueError, match="1 training samples for 2 processes: expected at least one each"):
        EpochSampler(1, training=True, world_size=2)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_repeats_come_in_a_row_and_are_dealt_out(processes: int) -> None:
    options: dict[str, Any] = {"training": True, "seed": 1, "world_size": processes, "repeats": 3}
    shares = [EpochSampler(20, rank=rank, **options) for rank in range(processes)]
    assert {len(share) for share in shares} == {len(list(share)) for share in shares} == {20 // processes}
    dealt = [key for step in zip(*shares, strict=True) for key in step]
    order = [index for _, index in EpochSampler(20, training=True, seed=1)]
    assert dealt == [(0, order[at // 3], at % 3) for at in range(20 - 20 % processes)]
    for share in shares:
        share.set_epoch(1)
    assert [key[1] for key in shares[0]] != [key[1] for key in dealt[::processes]]


def test_evaluation_knows_no_repeats() -> None:
    sampler = EpochSampler(5, training=False, repeats=3)
    assert list(sampler) == [(0, index) for index in range(5)]


# ----------------------------------------------------------------------------------------------------- loaders


class Keys(Dataset[dict[str, Any]]):
    """Tells which key it was asked for."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        return {"epoch": key[0], "index": key[1]}


class Broken(Keys):
    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        raise ValueError(f"sample {key[1]}: broken, expected whole")


class KeyData(TaskData):
    def setup(self, stage: str) -> None:
        self.datasets = {"train": Keys(), "val": Keys(), "test": Keys()}


class Recorder(LightningModule):
    """Writes down what it is trained and validated on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, list[int]]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert set(batch["epoch"].tolist()) == {self.current_epoch}
        self.seen.append((self.current_epoch, batch["index"].tolist()))
        return self.layer(torch.ones(1, 1)).sum()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.validated.append(batch["index"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(epochs: int, folder: Path) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_sees_the_epochs_that_the_whole_run_saw(tmp_path: Path, workers: int) -> None:
    def data() -> KeyData:
        return KeyData(batch_size=4, num_workers=workers, seed=1)

    whole = Recorder()
    trainer(4, tmp_path / "whole").fit(whole, data())
    assert [epoch for epoch, _ in whole.seen] == [epoch for epoch in range(4) for _ in range(3)]
    assert whole.validated == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 4
    assert sorted(index for _, batch in whole.seen[:3] for index in batch) == list(range(10))
    half = Recorder()
    trainer(2, tmp_path / "half").fit(half, data())
    (checkpoint,) = (tmp_path / "half").rglob("*.ckpt")
    rest = Recorder()
    trainer(4, tmp_path / "rest").fit(rest, data(), ckpt_path=checkpoint, weights_only=True)
    assert half.seen + rest.seen == whole.seen


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_leave_the_models_random_numbers_alone(workers: int) -> None:
    data = KeyData(batch_size=4, num_workers=workers)
    data.setup("fit")
    before = torch.get_rng_state()
    loader = data.train_dataloader()
    assert len(loader) == len(list(loader)) == len(list(loader)) == 3
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_sample_is_told_in_one_line(workers: int) -> None:
    loader = EpochLoader(Broken(), sampler=EpochSampler(10, training=False), num_workers=workers)
    with pytest.raises(ValueError, match=r"^sample 0: broken, expected whole$"):
        next(iter(loader))


def test_the_seed_is_that_of_the_run_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert KeyData().seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    assert KeyData().seed == 7
    assert KeyData(seed=3).seed == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("num_workers", -1),
        ("repeated_augmentation", 0),
        ("val_fraction", 0.0),
        ("val_fraction", 1.0),
        ("test_fraction", 0.95),
        ("test_fraction", -0.1),
    ],
)
def test_impossible_options_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected"):
        KeyData(**{name: value})


# ------------------------------------------------------------------------------------------------------- split


def test_a_split_keeps_the_shares_of_the_classes() -> None:
    labels = np.random.default_rng(0).permutation(["a"] * 100 + ["b"] * 50 + ["c"] * 10).tolist()
    parts = stratified_split(labels, [0.1, 0.2], seed=0)
    assert sorted(index for part in parts for index in part) == list(range(160))
    counts = [Counter(labels[index] for index in part) for part in parts]
    assert counts == [{"a": 70, "b": 35, "c": 7}, {"a": 10, "b": 5, "c": 1}, {"a": 20, "b": 10, "c": 2}]
    assert parts == stratified_split(labels, [0.1, 0.2], seed=0)
    assert parts != stratified_split(labels, [0.1, 0.2], seed=1)
    assert all(part == sorted(part) for part in parts)


def test_small_classes_stay_in_training_first() -> None:
    labels = ["one"] + ["two"] * 2 + ["three"] * 3 + ["four"] * 4
    train, val, test = ([labels[index] for index in part] for part in stratified_split(labels, [0.1, 0.1], seed=0))
    assert Counter(train) == {"one": 1, "two": 1, "three": 1, "four": 2}
    assert Counter(val) == {"two": 1, "three": 1, "four": 1}
    assert Counter(test) == {"three": 1, "four": 1}
    assert stratified_split(labels, [0.0], seed=0) == [list(range(10)), []]
    assert stratified_split(labels, [], seed=0) == [list(range(10))]
