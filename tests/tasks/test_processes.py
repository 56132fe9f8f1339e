"""Several processes: what they compute is what one computes, and none outlives the run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import ModelParallelStrategy

from multimodal import pretrained
from tasks import registry, sharding
from tasks.run import read_metrics
from tasks.sharding import FSDP2Strategy, choose_strategy
from tests.tasks.commands import QUIET, ROOT, SMALL, TWO, Run
from tests.tasks.two_processes import built, validated

TASKS = list(registry.discover()[0])
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"]
PLAIN = [*SMALL, "--model.ema_decay", "null", "--trainer.accelerator", "cpu"]
"""Of a run without a moving average, which sharded weights cannot have."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two_processes.py has left its runs and its results."""
    place = tmp_path_factory.mktemp("two")
    command = [*TORCHRUN, "tests.tasks.two_processes", str(place)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return place


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the command alone, without torchrun, has made in two processes."""
    place = tmp_path_factory.mktemp("console")
    flags = [*PLAIN, *TWO, "--trainer.strategy", "ddp", "--trainer.max_epochs", "2"]
    command = [sys.executable, "-m", "tasks.cli", "fit", "vit", *flags, "--trainer.default_root_dir", str(place)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("accuracy") == 1
    return _only_run(place)


def _only_run(root: Path) -> Path:
    (folder,) = (root / "vit").iterdir()
    return folder


def _saved(run: Path, name: str = "last") -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)
    return saved


def _distance(a: Any, b: Any) -> float:
    """The largest difference between tensors in equal nests of dicts."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max(_distance(a[key], b[key]) for key in a)
    assert a.dtype == b.dtype
    return float((a - b).abs().max())


# What is computed


@pytest.mark.parametrize("name", TASKS)
def test_gradients_are_those_of_one_process_on_the_whole_batch(results: dict[str, Any], name: str) -> None:
    gradients = results[name]["gradients"]
    assert gradients.keys() == {"ddp 1", "ddp 2", "fsdp2 1", "fsdp2 2"}, "without and with accumulation"
    assert max(gradients.values()) <= 1e-6


@pytest.mark.parametrize("name", TASKS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    module, data = built(registry.get(name))
    data.setup("fit")
    module.loss(next(iter(data.train_dataloader()))).backward()
    assert [name for name, parameter in module.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("name", TASKS)
def test_each_validation_sample_counts_once(results: dict[str, Any], name: str, size: int) -> None:
    found = results[name]["validation"][str(size)]
    assert found["read"] == [1] * size
    assert found["total"] == size
    _, alone = validated(registry.get(name), size, accelerator="cpu", devices=1)
    assert found["metrics"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_processes_drop_different_units_and_the_same_ones_again(results: dict[str, Any], name: str) -> None:
    first, again = results[name]["dropped"]
    assert first == again
    assert first[0] != first[1]


# Whole runs


def test_every_command_of_the_two_processes_ended_well(results: dict[str, Any]) -> None:
    assert all(set(codes.values()) == {0} for codes in results["runs"]["codes"])


def test_a_checkpoint_measures_the_same_in_one_process_and_in_two(
    run: Run, folder: Path, results: dict[str, Any]
) -> None:
    alone = run("validate", "vit", "--checkpoint", _only_run(folder / "ddp"), *QUIET, "--trainer.accelerator", "cpu")
    assert alone.out.startswith("val/")
    assert results["runs"]["validated"] == alone.out * 2, "by ddp and by fsdp2; 145 samples do not divide"


def test_the_command_alone_does_what_torchrun_does(console: Path, folder: Path) -> None:
    assert read_metrics(console) == read_metrics(_only_run(folder / "ddp"))
    steps = [row["step"] for row in read_metrics(console) if "val/loss" in row]
    assert steps == [2, 5], "each row once: 3 steps an epoch"
    summary = json.loads((console / "summary.json").read_text())
    assert summary["value"] * 360 == pytest.approx(round(summary["value"] * 360), abs=1e-3), "360 test images"
    assert len(list(console.glob("events.out.tfevents.*"))) == 2, "training's and testing's, of one process"


def test_sharded_training_is_that_of_whole_copies(folder: Path) -> None:
    whole, sharded = (_saved(_only_run(folder / name)) for name in ("ddp", "fsdp2"))
    assert whole.keys() == sharded.keys()
    assert list(whole["state_dict"]) == list(sharded["state_dict"])
    assert _distance(whole["state_dict"], sharded["state_dict"]) <= 1e-5
    a, b = whole["optimizer_states"][0], sharded["optimizer_states"][0]
    assert a["param_groups"] == b["param_groups"]
    assert _distance(a["state"], b["state"]) <= 1e-5
    rows, others = (read_metrics(_only_run(folder / name)) for name in ("ddp", "fsdp2"))
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    assert all(row == pytest.approx(other, rel=1e-4) for row, other in zip(rows, others, strict=True))


def test_sharded_training_goes_on_from_a_run_of_whole_copies(folder: Path) -> None:
    whole, sharded = (_saved(folder / f"resumed-{name}") for name in ("ddp", "fsdp2"))
    assert whole["epoch"] == sharded["epoch"] == 3
    assert _distance(whole["state_dict"], sharded["state_dict"]) <= 1e-5
    assert _distance(whole["optimizer_states"][0]["state"], sharded["optimizer_states"][0]["state"]) <= 1e-5


def test_one_process_uses_what_sharded_training_saved(run: Run, folder: Path) -> None:
    shutil.copytree(_only_run(folder / "fsdp2"), "copy")
    loaded = pretrained.load("copy", task="vit")
    saved = _saved(Path("copy"), "best")["state_dict"]
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in loaded.model.state_dict().items())
    tested = run("test", "vit", "--checkpoint", "copy", "--trainer.accelerator", "cpu", *QUIET)
    value = json.loads(Path("copy/summary.json").read_text())["value"]
    assert f"test/accuracy  {value:.4f}" in tested.out
    alone = ["--trainer.devices", "1", "--trainer.strategy", "auto", "--trainer.max_epochs", "3"]
    assert run("fit", "vit", "--resume", "copy", *alone).code == 0
    assert _saved(Path("copy"))["epoch"] == 3


def test_weights_in_channels_last_order_are_divided_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "fully_shard", lambda *args, **options: None)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight = model.weight.clone()
    sharding.shard(model, mesh=None)
    assert model.weight.is_contiguous()
    assert torch.equal(model.weight, weight)


def test_lightnings_own_strategy_is_this_one() -> None:
    assert isinstance(choose_strategy(ModelParallelStrategy(), None), FSDP2Strategy)


# What cannot be


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.devices", "0"], "`Trainer(devices='0')` value is not a valid input using cpu accelerator."),
        (["--trainer.devices", "[0,1]"], "`devices` selected with `CPUAccelerator` should be an int > 0."),
        (["--trainer.strategy", "dpp"], "trainer.strategy: unknown value dpp: did you mean ddp?"),
        (["--trainer.strategy", "fsdp"], "trainer.strategy is fsdp, expected fsdp2, which divides data alone"),
        (
            ["--trainer.strategy", "ModelParallelStrategy", "--trainer.strategy.tensor_parallel_size", "2"],
            "is ModelParallelStrategy, expected fsdp2, which divides data alone",
        ),
        (["--trainer.strategy", "fsdp2", "--model.ema_decay", "0.9"], "model.ema_decay is 0.9, but trainer.strategy"),
        (["--trainer.strategy", "fsdp2", "--trainer.precision", "64"], "trainer.precision is 64-true, which trainer"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_starts(run: Run, flags: list[str], message: str) -> None:
    result = run("fit", "vit", *PLAIN, *flags)
    assert result.code == 2
    assert message in result.error
    assert not list(Path().glob("runs/vit/*"))


# Lost processes

FAULTS = {
    "an error": ({"how": "raise", "rank": 1}, "sample 7 is broken"),
    "killed while the first validates": (
        {"how": "kill", "rank": 1, "validating": True},
        "a process of this run ended with code -9",
    ),
    "the first killed while the other validates": (
        {"how": "kill", "rank": 0, "validating": True},
        "the process that started this one is gone",
    ),
}


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """Runs that will lose a process, all started at once, and what each says."""
    started = {}
    for name, (fault, _) in FAULTS.items():
        place = tmp_path_factory.mktemp("lost")
        options = [f"--trainer.callbacks.{option}={value}" for option, value in fault.items()]
        flags = [*PLAIN, *TWO, "--data.batch_size", "16", "--trainer.num_sanity_val_steps", "0"]
        flags += ["--trainer.strategy", "ddp", "--trainer.callbacks+=tests.tasks.faults.Fault", *options]
        command = [sys.executable, "-m", "tasks.cli", "fit", "vit", *flags, "--trainer.default_root_dir", str(place)]
        with (place / "err").open("w") as err:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=err, process_group=0)
        started[name] = (process, place / "err")
    yield started
    for process, _ in started.values():
        with suppress(ProcessLookupError):  # what hangs does not outlive the test
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", FAULTS)
def test_a_lost_process_ends_the_run(losing: dict[str, tuple[subprocess.Popen[bytes], Path]], name: str) -> None:
    process, err = losing[name]
    assert process.wait(timeout=90) != 0
    deadline = time.monotonic() + 30
    while _alive(process.pid):
        assert time.monotonic() < deadline, "a process outlives the run"
        time.sleep(0.2)
    said = err.read_text()
    assert f"multimodal: error: {FAULTS[name][1]}" in said.splitlines()
    assert "Traceback" not in said


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# Precision and compilation


@pytest.mark.parametrize(
    "flags",
    [["--trainer.precision", "bf16-mixed"], ["--trainer.precision", "16-mixed"], ["--model.compile", "true"]],
    ids=["bf16", "fp16", "compiled (half a minute)"],
)
def test_checkpoints_hold_the_same_keys_in_single_precision(run: Run, flags: list[str]) -> None:
    tiny = ["--model.depth", "1", "--trainer.accelerator", "cpu", "--trainer.max_steps", "2"]
    only_training = ["--trainer.limit_val_batches", "0", "--trainer.limit_test_batches", "0"]
    assert run("fit", "vit", *SMALL, *tiny, *only_training, *flags).code == 0
    saved = _saved(_only_run(Path("runs")))
    eager, _ = built(registry.get("vit"), *tiny)
    for part in ("state_dict", "current_model_state"):
        assert list(saved[part]) == list(eager.state_dict())
        assert {value.dtype for value in saved[part].values()} == {torch.float32}
    moments = [value for state in saved["optimizer_states"][0]["state"].values() for value in state.values()]
    assert {value.dtype for value in moments} == {torch.float32}
    loaded = pretrained.load(str(_only_run(Path("runs"))), task="vit")
    assert torch.equal(loaded.model.head.weight, saved["state_dict"]["model.head.weight"])
