"""fit, validate and test on the digits: what a run leaves behind, and what it can start from."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from multimodal import pretrained
from tasks.run import read_metrics
from tests.tasks.commands import QUIET, ROOT, SMALL, Run

ARTEFACTS = {
    "config.yaml",
    "metrics.csv",
    "curves.png",
    "summary.json",
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
}


def _files(folder: Path) -> set[str]:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return files - {".lock", "checkpoints/previous.ckpt"}


def _only_run(root: Path) -> Path:
    (folder,) = (root / "vit").iterdir()
    return folder


def _saved(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, weights_only=True)
    return saved


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# A run


def test_loggers_are_told_the_seed_the_data_and_where_the_run_is(trained: Path) -> None:
    told = (trained / "hparams.yaml").read_text()
    for line in (f"run: {trained}", "seed_everything: 0", "  batch_size: 256", "embed_dim: 16"):
        assert f"\n{line}\n" in told


def test_what_a_run_leaves_behind(trained: Path) -> None:
    assert _files(trained) >= ARTEFACTS
    assert any(name.startswith("events.out.tfevents") for name in _files(trained))
    summary = json.loads((trained / "summary.json").read_text())
    assert summary.keys() == {"task", "metric", "value", "params", "seconds", "precision", "checkpoint"}
    assert (summary["task"], summary["metric"]) == ("vit", "accuracy")
    assert 0 <= summary["value"] <= 1
    assert Path(summary["checkpoint"]) == trained / "checkpoints" / "best.ckpt"
    rows = read_metrics(trained)
    for name in ("train/loss", "train/loss_step", "val/loss", "val/accuracy", "val/top5", "lr", "test/accuracy"):
        assert any(name in row for row in rows), name


def test_a_checkpoint_is_plain_data_and_holds_raw_and_averaged_weights(trained: Path) -> None:
    saved = _saved(trained / "checkpoints" / "last.ckpt")
    record = saved["multimodal"]
    assert record["task"] == "vit"
    assert record["labels"] == [str(digit) for digit in range(10)]
    assert record["preprocess"]["size"] == [8, 8]
    assert json.loads(json.dumps(record)) == record
    averaged, raw = saved["state_dict"], saved["current_model_state"]
    assert averaged.keys() == raw.keys()
    assert all(key.startswith("model.") for key in averaged)
    assert any(not torch.equal(averaged[key], raw[key]) for key in averaged)


def test_the_printed_config_runs_again(run: Run) -> None:
    flags = ["--model.ema_decay", "null", "--trainer.max_epochs", "3", "--model.drop_path", "[0.0,0.1]", *SMALL]
    printed = run("fit", "vit", *flags, "--print_config").out
    Path("my.yaml").write_text(printed)
    assert run("fit", "vit", "--config", "my.yaml", "--print_config").out == printed
    config = yaml.safe_load(printed)
    assert config["model"]["ema_decay"] is None
    assert config["trainer"]["max_epochs"] == 3
    assert "num_classes" not in config["model"]
    assert run("fit", "vit", "--config", "my.yaml", "--trainer.fast_dev_run", "true").code == 0


def test_the_config_of_a_run_is_the_one_that_was_printed(run: Run, trained: Path) -> None:
    assert (
        run("fit", "vit", "--config", trained / "config.yaml", "--print_config").out
        == (trained / "config.yaml").read_text()
    )


def test_flags_win_over_config_files_and_these_over_the_recipe(run: Run) -> None:
    recipe = yaml.safe_load(run("fit", "vit", "--print_config").out)
    Path("my.yaml").write_text("model: {depth: 9, lr: 0.5}")
    config = yaml.safe_load(run("fit", "vit", "--config", "my.yaml", "--model.depth", "7", "--print_config").out)
    assert (config["model"].pop("depth"), config["model"].pop("lr")) == (7, 0.5)
    del recipe["model"]["depth"], recipe["model"]["lr"]
    assert config == recipe
    assert recipe["seed_everything"] == 0


@pytest.mark.parametrize(
    ("flags", "left_behind"),
    [
        (["--trainer.fast_dev_run", "true"], set()),
        (["--trainer.barebones", "true", "--trainer.log_every_n_steps", "0"], set()),
        (
            ["--trainer.logger", "false"],
            {"config.yaml", "summary.json", "checkpoints/best.ckpt", "checkpoints/last.ckpt"},
        ),
        (["--trainer.enable_checkpointing", "false"], {"config.yaml", "summary.json", "metrics.csv", "curves.png"}),
        (["--trainer.limit_val_batches", "0"], ARTEFACTS - {"checkpoints/best.ckpt"}),
        (["--trainer.callbacks+=LearningRateMonitor"], ARTEFACTS),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/loss"], ARTEFACTS),
        (["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", "mine"], ARTEFACTS),
        (["--trainer.precision", "bf16-mixed"], ARTEFACTS),
        (["--trainer.max_steps", "2"], ARTEFACTS - {"checkpoints/best.ckpt"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_trainer_flags(run: Run, tmp_path: Path, flags: list[str], left_behind: set[str]) -> None:
    small = SMALL if "barebones" not in flags[0] else [*SMALL[4:-2]]
    result = run("fit", "vit", *small, "--trainer.max_epochs", "1", *flags)
    assert result.code == 0
    assert "value" in result.out
    folders = list(tmp_path.glob("runs/vit/*"))
    assert len(folders) == bool(left_behind)
    if folders:
        files = {name for name in _files(folders[0]) if "tfevents" not in name}
        assert files - {"hparams.yaml"} == left_behind
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "mine"}


def test_of_equally_good_checkpoints_the_latest_is_kept(run: Run, tmp_path: Path) -> None:
    assert (
        run("fit", "vit", *SMALL, "--trainer.max_epochs", "3", "--model.lr", "1e-12", "--model.ema_decay", "null").code
        == 0
    )
    assert _saved(_only_run(tmp_path / "runs") / "checkpoints" / "best.ckpt")["epoch"] == 2


def test_a_damaged_image_ends_a_run_in_one_line(run: Run) -> None:
    for name in ("a/1.png", "a/2.png", "a/3.png", "b/1.png", "b/2.png", "b/3.png"):
        Path("images", name).parent.mkdir(parents=True, exist_ok=True)
        Path("images", name).write_text("no image")
    flags = ["--data.root", "images", "--data.num_workers", "0", *QUIET]
    result = run("fit", "vit", *flags)
    assert "no known image format inside" in result.error
    assert result.code == 1


# From a checkpoint


def test_a_run_is_measured_again(run: Run, trained: Path, tmp_path: Path) -> None:
    result = run("test", "vit", "--checkpoint", trained, *QUIET)
    summary = json.loads((trained / "summary.json").read_text())
    assert f"test/accuracy  {summary['value']:.4f}" in result.out
    best = max(row["val/accuracy"] for row in read_metrics(trained) if "val/accuracy" in row)
    result = run("validate", "vit", "--checkpoint", trained / "checkpoints" / "best.ckpt", *QUIET)
    assert f"val/accuracy  {best:.4f}" in result.out
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_decides_architecture_preprocessing_and_classes(run: Run, trained: Path) -> None:
    config = yaml.safe_load(run("test", "vit", "--checkpoint", trained, "--print_config").out)
    assert config["model"]["embed_dim"] == 16
    assert config["data"]["batch_size"] == 256
    assert config["data"]["labels"] == [str(digit) for digit in range(10)]
    assert config["data"]["mean"] == pytest.approx([0.305])


def test_a_flag_that_does_not_fit_the_checkpoint_is_refused(run: Run, trained: Path) -> None:
    result = run("test", "vit", "--checkpoint", trained, "--model.depth", "3")
    assert "missing encoder.blocks.2." in result.error
    assert result.code == 2


def test_the_checkpoint_of_another_task_is_refused(run: Run, trained: Path) -> None:
    saved = _saved(trained / "checkpoints" / "best.ckpt")
    saved["multimodal"]["task"] = "detr"
    torch.save(saved, "other.ckpt")
    for command in (("test", "vit", "--checkpoint"), ("fit", "vit", "--init")):
        assert "other.ckpt: holds a model of task 'detr', expected 'vit'" in run(*command, "other.ckpt").error


def test_fine_tuning_starts_from_the_weights_and_freezes(
    run: Run, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = [*QUIET, "--trainer.max_epochs", "1"]
    assert run("fit", "vit", "--init", trained, "--freeze", "encoder.*", *flags).code == 0
    assert "replaced" not in caplog.text
    before = pretrained.read(trained).state_dict
    after = pretrained.read(_only_run(tmp_path / "runs"))
    assert after.config["embed_dim"] == 16
    for name, value in after.state_dict.items():
        assert torch.equal(value, before[name]) == name.startswith("encoder."), name
    config = yaml.safe_load((_only_run(tmp_path / "runs") / "config.yaml").read_text())
    assert (config["init"], config["freeze"]) == (str(trained), "encoder.*")


def test_a_pattern_that_freezes_nothing_is_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    result = run("fit", "vit", "--init", trained, "--freeze", "[encoder.*,blocks.*]")
    assert "--freeze blocks.* matches no parameter; their names begin with encoder, head, patch_embed" in result.error
    assert not list(tmp_path.iterdir())


def test_other_classes_get_a_new_head_and_another_size_new_positions(
    run: Run, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = pretrained.read(trained)
    checkpoint.labels[:] = [f"class {digit}" for digit in range(10)]
    pretrained.save("other.safetensors", checkpoint)
    flags = ["--model.image_size", "12", "--trainer.fast_dev_run", "true", "--data.batch_size", "256"]
    assert run("fit", "vit", "--init", "other.safetensors", *flags).code == 0
    assert "The head for the checkpoint's 10 classes is replaced by a new one for 10." in caplog.text


# Going on


def test_a_resumed_run_goes_on_in_its_folder(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = ["fit", "vit", *SMALL, "--trainer.max_epochs", "1"]
    assert run(*start).code == 0
    folder = _only_run(tmp_path / "runs")
    moved = folder.rename(tmp_path / "moved")
    first = _saved(moved / "checkpoints" / "last.ckpt")
    assert run("fit", "vit", "--resume", moved, "--trainer.max_epochs", "3", "--model.lr", "0.5").code == 0
    assert "The run is now 18 steps long, not 6: the schedule is that of the new length, from step 6 on" in caplog.text
    assert not list((tmp_path / "runs" / "vit").iterdir())
    second = _saved(moved / "checkpoints" / "last.ckpt")
    assert (first["global_step"], second["global_step"]) == (6, 18)
    assert second["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 0.5
    rows = [row for row in read_metrics(moved) if "val/loss" in row]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    config = yaml.safe_load((moved / "config.yaml").read_text())
    assert (config["trainer"]["max_epochs"], config["model"]["lr"], config["resume"]) == (3, 0.5, None)
    best = next(state for key, state in second["callbacks"].items() if "val/accuracy" in key)
    assert Path(best["best_model_path"]) == moved / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--freeze", "encoder.*"], "its optimizer has groups of [25, 14] parameters, expected [3, 2]"),
        (
            ["--model.layer_decay", "0.5"],
            "--freeze, model.layer_decay and other factors on model.lr stay as they are in a run",
        ),
        (["--trainer.default_root_dir", "x"], "trainer.default_root_dir is x, but a run goes on where it is: copy"),
        (["--model.optimizer", "lamb"], "model.optimizer is lamb, expected adamw as in the run so far"),
        (["--trainer.max_epochs", "-1"], "the run has no end, or no step"),
    ],
)
def test_a_run_that_cannot_go_on_as_told_stays_as_it_is(
    run: Run, trained: Path, flags: list[str], message: str
) -> None:
    shutil.copytree(trained, "copy")
    assert message in run("fit", "vit", "--resume", "copy", *QUIET, *flags).error
    assert read_metrics(Path("copy")) == read_metrics(trained)
    for name in ("config.yaml", "summary.json", "checkpoints/last.ckpt"):
        assert Path("copy", name).read_bytes() == (trained / name).read_bytes()


def test_a_try_writes_nothing_into_the_run(run: Run, trained: Path) -> None:
    before = {name: (trained / name).read_bytes() for name in _files(trained)}
    error = run("fit", "vit", "--resume", trained, "--trainer.fast_dev_run", "true").error
    assert error.startswith("--resume and a trial (fast_dev_run, barebones): expected one")
    assert {name: (trained / name).read_bytes() for name in _files(trained)} == before


def test_a_run_without_a_checkpoint_is_refused(run: Run) -> None:
    Path("empty").mkdir()
    Path("empty/config.yaml").touch()
    assert "has not saved checkpoints/last.ckpt yet" in run("fit", "vit", "--resume", "empty").error


# In processes of its own


TWO = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"]


def test_ctrl_c_stops_two_processes_together_and_one_goes_on(run: Run, tmp_path: Path) -> None:
    flags = [*SMALL, *TWO, "--trainer.max_epochs", "100000"]
    command = [sys.executable, "-m", "tasks.cli", "fit", "vit", *flags, "--trainer.default_root_dir", str(tmp_path)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("best.ckpt")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
    try:
        _, err = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):  # what hangs does not outlive the test
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "Traceback" not in err
    folder = _only_run(tmp_path)
    assert f"go on with: multimodal fit vit --resume {folder}" in err
    epochs = _saved(folder / "checkpoints" / "last.ckpt")["epoch"]
    alone = ["--trainer.devices", "1", "--trainer.strategy", "auto"]
    assert run("fit", "vit", "--resume", folder, "--trainer.max_epochs", epochs + 1, *alone).code == 0
