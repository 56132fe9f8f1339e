"""Every task: wherever a run is interrupted, it goes on and ends as if it had not been."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tasks.checkpoints import LastCheckpoint
from tasks.cli import main
from tasks.registry import discover
from tasks.run import read_metrics
from tasks.vit.task import ViTModule
from tests.tasks.commands import QUIET, ROOT, TINY, Run

TASKS = sorted(discover()[0])

HARD = [
    *("--trainer.max_epochs", "2", "--model.ema_decay", "0.9"),
    *("--save_every_n_steps", "1", "--trainer.log_every_n_steps", "1"),
]
"""Averaged weights; a checkpoint before each step, and while it validates."""

CASES = {
    "plain": [],
    "validation within the epoch": ["--trainer.val_check_interval", "0.5", "--trainer.accumulate_grad_batches", "2"],
    "validation between accumulations": [
        *("--trainer.val_check_interval", "4", "--trainer.accumulate_grad_batches", "2"),
        *("--trainer.check_val_every_n_epoch", "null"),
    ],
    "workers": ["--data.num_workers", "2"],
    "counted in steps": ["--trainer.max_steps", "9", "--trainer.max_epochs", "-1"],
    "validation behind the last step": [
        *("--trainer.max_steps", "9", "--trainer.max_epochs", "-1", "--trainer.val_check_interval", "0.5"),
    ],
    "validation every other epoch": ["--trainer.check_val_every_n_epoch", "2"],
    "no validation": ["--trainer.limit_val_batches", "0"],
}
FOR_ALL = ("plain", "validation within the epoch", "workers")
"""The other cases ask the loop alone, which all tasks share: one task has them."""


def test_every_task_is_tested() -> None:
    assert sorted(TINY) == TASKS


def _last(run: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return saved


def _assert_equal(run: Path, expected: Path) -> None:
    ours, theirs = _last(run), _last(expected)
    for part in ("state_dict", "current_model_state"):
        assert ours[part].keys() == theirs[part].keys()
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in ours[part]), part
    assert str(ours["optimizer_states"]) == str(theirs["optimizer_states"])
    for part in ("epoch_loop.state_dict", "epoch_loop.batch_progress", "epoch_progress"):
        assert ours["loops"]["fit_loop"][part] == theirs["loops"]["fit_loop"][part]
    assert _logged(run) == _logged(expected)


def _logged(run: Path) -> list[dict[str, float]]:
    """All rows; without the epoch of the final test, which counts one that max_steps cut short, or does not."""
    rows = read_metrics(run)
    return [{name: row[name] for name in row if name != "epoch" or "test/loss" not in row} for row in rows]


@pytest.mark.parametrize(
    ("task", "case"), [(task, case) for task in TASKS for case in (CASES if task == "vit" else FOR_ALL)]
)
def test_a_run_goes_on_from_every_checkpoint(
    task: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the run's folder after each save is what a kill at that moment leaves behind."""
    copies = tmp_path / "copies"
    save = LastCheckpoint._save

    def save_and_copy(self: LastCheckpoint, trainer: Any) -> None:
        before = self._saved
        save(self, trainer)
        if self._saved != before and self.path:
            shutil.copytree(self.path.parents[1], copies / f"{len(list(copies.glob('*'))):02d}")

    with monkeypatch.context() as patched:
        patched.setattr(LastCheckpoint, "_save", save_and_copy)
        assert main(["fit", task, *TINY[task], *HARD, *CASES[case], "--trainer.default_root_dir", str(tmp_path)]) == 0
    (run,) = (tmp_path / task).iterdir()
    moments = sorted(copies.iterdir())
    assert len(moments) >= 4
    # One of each kind: the first step, around the end of an epoch, the end.
    middle = len(moments) // 2
    for copy in {moments[index] for index in (0, middle - 1, middle, middle + 1, -2, -1)}:
        assert main(["fit", task, "--resume", str(copy), *QUIET]) == 0
        _assert_equal(copy, run)


def _start(task: str, root: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tasks.cli", "fit", task, *TINY[task], *flags]
    return subprocess.Popen(
        [*command, "--trainer.default_root_dir", str(root)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # as in this process: sums depend on it in their last bits
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )


SIGNALS = [("vit", signal.SIGKILL), ("vit", signal.SIGINT), *((task, signal.SIGTERM) for task in TASKS)]


@pytest.mark.parametrize(("task", "number"), SIGNALS, ids=lambda value: getattr(value, "name", value))
def test_a_stopped_process_goes_on(task: str, number: signal.Signals, tmp_path: Path) -> None:
    flags = [*HARD, "--trainer.max_epochs", "8", "--data.num_workers", "2"]
    assert main(["fit", task, *TINY[task], *flags, "--trainer.default_root_dir", str(tmp_path / "whole")]) == 0
    process = _start(task, tmp_path / "stopped", *flags)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("stopped/*/*/checkpoints/last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, number)  # as a terminal does, and a cluster: also to the workers of the loaders
    _, err = process.communicate(timeout=60)
    expected = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert process.returncode == expected
    assert "Traceback" not in err
    (run,), (whole,) = (list((tmp_path / name / task).iterdir()) for name in ("stopped", "whole"))
    assert _last(run)["global_step"] < _last(whole)["global_step"]
    if number != signal.SIGKILL:
        assert f"go on with: multimodal fit {task} --resume {run}" in err
    assert main(["fit", task, "--resume", str(run), *QUIET]) == 0
    _assert_equal(run, whole)


@pytest.fixture
def copy(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run to spoil."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(run: Run, copy: Path) -> None:
    last, previous = copy / "checkpoints" / "last.ckpt", copy / "checkpoints" / "previous.ckpt"
    assert torch.load(previous, weights_only=True)["global_step"] == 6
    _flip(last)
    assert run("fit", "vit", "--resume", last, *QUIET).error.startswith(f"{last}: damaged (checksum of ")
    with pytest.warns(UserWarning, match=r"last.ckpt: damaged \(checksum of .*; the run goes on from previous.ckpt"):
        assert run("fit", "vit", "--resume", copy, *QUIET).code == 0
    assert _last(copy)["global_step"] == 12
    assert torch.load(previous, weights_only=True)["global_step"] == 6
    assert last.with_name("last.ckpt.damaged").is_file()


def test_a_run_of_damaged_checkpoints_is_refused(run: Run, copy: Path) -> None:
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
        path = copy / "checkpoints" / name
        path.write_bytes(path.read_bytes()[:1000])
    assert run("fit", "vit", "--resume", copy, *QUIET).error.count("the file is cut short") == 3


def test_a_kill_between_two_renames_leaves_the_one_before(run: Run, copy: Path) -> None:
    (copy / "checkpoints" / "last.ckpt").unlink()
    assert run("fit", "vit", "--resume", copy, *QUIET).code == 0
    assert _last(copy)["global_step"] == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data.batch_size", "100"],
            "behind batch 3 of an epoch, with batch_size 256; now it is 100, expected",
        ),
        (["--data.seed", "5"], "with seed 0; now it is 5"),
        (["--data.val_fraction", "0.2"], "with samples 1292; now it is "),
    ],
)
def test_what_decides_the_batches_does_not_change_within_an_epoch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    loss = ViTModule.loss

    def broken(self: ViTModule, batch: Any) -> torch.Tensor:
        if self.global_step == 3:
            raise ValueError("a damaged image")
        return loss(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(ViTModule, "loss", broken)
        error = run("fit", "vit", *TINY["vit"], "--save_every_n_steps", "1").error
    (folder,) = (tmp_path / "runs" / "vit").iterdir()
    checkpoint = f"{folder.relative_to(tmp_path)}/checkpoints/last.ckpt"
    assert error == f"a damaged image; the last good checkpoint is {checkpoint}"
    assert message in run("fit", "vit", "--resume", folder, *QUIET, *flags).error


def test_a_run_that_max_steps_cut_short_goes_on_in_its_epoch(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("fit", "vit", *TINY["vit"], "--trainer.max_steps", "8").code == 0
    (folder,) = (tmp_path / "runs" / "vit").iterdir()
    assert run("fit", "vit", "--resume", folder, "--trainer.max_steps", "14", *QUIET).code == 0
    saved = _last(folder)
    (loader,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (saved["global_step"], loader["epoch"], loader["batches"]) == (14, 2, 2)
    steps = [row["step"] for row in read_metrics(folder) if "val/loss" in row]
    assert steps == [5, 11]


def test_a_signal_in_a_validation_within_an_accumulation_loses_no_gradient(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six batches, two a step, and a validation behind the third."""
    monkeypatch.chdir(tmp_path)
    flags = [*TINY["vit"], *HARD, "--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "0.5"]
    assert run("fit", "vit", *flags, "--trainer.default_root_dir", "whole").code == 0
    evaluate = ViTModule.evaluate

    def interrupted(self: ViTModule, *arguments: Any) -> None:
        if self.trainer.fit_loop.total_batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        evaluate(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ViTModule, "evaluate", interrupted)
        assert run("fit", "vit", *flags).code == 143
    (folder,), (whole,) = (list((tmp_path / name / "vit").iterdir()) for name in ("runs", "whole"))
    assert run("fit", "vit", "--resume", folder, *QUIET).code == 0
    _assert_equal(folder, whole)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("checkpoints/bset.ckpt", "no such checkpoint, there are best.ckpt, last.ckpt, previous.ckpt"),
        ("nothing", "no run there, expected a folder with config.yaml, or a checkpoint in one"),
    ],
)
def test_a_mistyped_checkpoint_is_refused(run: Run, copy: Path, source: str, message: str) -> None:
    assert run("fit", "vit", "--resume", copy / source, *QUIET).error == f"--resume {copy / source}: {message}"


@pytest.mark.parametrize("place", [".", "checkpoints", "checkpoints/last.ckpt"])
def test_a_run_is_found_from_within(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir((copy / place) if (copy / place).is_dir() else (copy / place).parent)
    source = "." if (copy / place).is_dir() else "last.ckpt"
    with pytest.warns(UserWarning, match="had all its 12 steps behind it"):
        assert run("fit", "vit", "--resume", source, *QUIET).code == 0


@pytest.mark.parametrize(
    ("flag", "value", "had"), [("num_heads", "4", "2"), ("norm_order", "post", "pre"), ("depth", "3", "2")]
)
def test_a_run_keeps_its_model(run: Run, copy: Path, flag: str, value: str, had: str) -> None:
    error = run("fit", "vit", "--resume", copy, f"--model.{flag}", value, *QUIET).error
    assert f"last.ckpt: its model has {flag} {had}, expected {value}; a run keeps its model" in error


def test_other_data_are_said(run: Run, copy: Path) -> None:
    with pytest.warns(UserWarning, match="the training data, or their split, are not those that the run has had"):
        result = run("fit", "vit", "--resume", copy, "--trainer.max_epochs", "3", "--data.split_seed", "7", *QUIET)
    assert result.code == 0


def test_a_finished_run_says_so_and_is_tested_again(run: Run, copy: Path) -> None:
    before = read_metrics(copy)
    with pytest.warns(UserWarning, match="copy had all its 12 steps behind it; more of trainer.max_epochs"):
        assert run("fit", "vit", "--resume", copy, *QUIET).code == 0
    assert read_metrics(copy) == before


def test_two_processes_do_not_share_a_run(run: Run, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.run.PATIENCE", 0.2)
    with FileLock(copy / ".lock"):
        result = run("fit", "vit", "--resume", copy, *QUIET)
    assert result.error == f"{copy}: another process is training in this run; each needs one of its own"


@pytest.mark.parametrize("value", ["0", "-1", "ten"])
def test_intervals_of_saves_are_checked(run: Run, value: str) -> None:
    for flag in ("--save_every_n_steps", "--save_every_n_minutes"):
        result = run("fit", "vit", flag, value)
        assert flag.removeprefix("--") in result.error
        assert result.code == 2


FILLING = """
import resource, sys
from tasks.checkpoints import LastCheckpoint
from tasks.cli import main

save = LastCheckpoint._save

def save_and_fill(self, trainer):
    save(self, trainer)
    if self.path.is_file():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

LastCheckpoint._save = save_and_fill
sys.exit(main(sys.argv[1:]))
"""
"""A limit on the size of files, from the first save on, does what a full disk does: a write fails in the middle."""


def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    flags = ["--save_every_n_steps", "1", "--trainer.default_root_dir", str(tmp_path)]
    command = [sys.executable, "-c", FILLING, "fit", "vit", *TINY["vit"], *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("multimodal: error:")]
    (run,) = (tmp_path / "vit").iterdir()
    path = run / "checkpoints" / "last.ckpt"
    assert line.endswith(f"File too large: '{path}'; the last good checkpoint is {path}")
    assert "Traceback" not in result.stderr
    assert _last(run)["global_step"] == 1
    assert {file.name for file in path.parent.iterdir()} == {"last.ckpt"}


def test_a_run_that_diverges_names_the_last_good_checkpoint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loss = ViTModule.loss
    monkeypatch.setattr(
        ViTModule, "loss", lambda self, batch: loss(self, batch) * (float("inf") if self.global_step == 8 else 1)
    )
    error = run("fit", "vit", *TINY["vit"], "--trainer.max_epochs", "3", "--save_every_n_steps", "1").error
    (folder,) = (tmp_path / "runs" / "vit").iterdir()
    assert error == (
        "train/loss is not finite at step 8, learning rate 0.000955: training has diverged; try a smaller model.lr; "
        f"the last good checkpoint is {folder.relative_to(tmp_path)}/checkpoints/last.ckpt"
    )
    saved = _last(folder)
    assert saved["global_step"] == 8
    assert all(value.isfinite().all() for value in saved["state_dict"].values())
