"""The front end: answers without torch, and one line for whatever is mistyped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import registry
from tests.tasks.commands import ROOT, SMALL, Run


def test_the_front_end_imports_the_standard_library_alone() -> None:
    code = "import sys; had = {*sys.modules}; from tasks.cli import main; main(['tasks']); print(*{*sys.modules} - had)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    roots = {name.split(".")[0] for name in result.stdout.splitlines()[-1].split()}
    assert roots - {"tasks"} <= sys.stdlib_module_names


def test_help_lists_verbs_and_tasks(run: Run) -> None:
    out = run("--help").out
    assert "fit TASK" in out
    assert "predict TASK" in out
    assert "vit" in out
    assert run("fit").out == run("fit", "--help").out
    assert "vit" in run("fit").out
    assert [run("fit", "--help").code, run("fit").code] == [0, 2]


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("multimodal ")


def test_tasks(run: Run) -> None:
    assert "vit" in run("tasks").out
    listed = json.loads(run("tasks", "--json").out)
    assert {entry["name"] for entry in listed} == set(registry.discover()[0])
    assert listed[0]["verbs"]


def test_flags_are_typed_and_explained(run: Run) -> None:
    out = " ".join(run("fit", "vit", "--help").out.split())
    assert "--model.depth DEPTH Number of blocks. (type: int" in out
    assert "--model.lr LR Peak learning rate. (type: float" in out
    assert "--model.label_smoothing" in out
    assert "--init INIT Weights to start from" in out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fitt vit", "unknown verb 'fitt': did you mean fit?"),
        ("fit vti", "unknown task 'vti': did you mean vit?"),
        ("tasks --jsno", "unknown flag --jsno: did you mean --json?"),
        ("predict vit x.png --checkpont y", "unknown flag --checkpont: did you mean --checkpoint?"),
        ("predict vit x.png --checkpoint y --top-k 0", "argument --top-k: '0' is not a whole number of at least 1"),
        ("fit vit --trainer.max_epoch 3", "unknown flag --trainer.max_epoch: did you mean --trainer.max_epochs?"),
        ("fit vit --model.depth abc", "model.depth: unknown value abc: expected int"),
        ("fit vit --model.depth -1", "depth is -1, expected at least 1"),
        ("fit vit --model.embed_dim 100 --model.num_heads 12", "embed_dim 100 is not a multiple of num_heads 12"),
        ("fit vit --model.image_size 9", "image_size 9 x 9 is not a multiple of patch_size 2 x 2"),
        ("fit vit --model.norm lyer", "model.norm: unknown value lyer: did you mean layer?"),
        ("fit vit --model.ema_decay 2", "ema_decay is 2.0, expected a rate in (0, 1)"),
        ("fit vit --trainer.precision bf17", "trainer.precision: unknown value bf17: did you mean bf16?"),
        ("fit vit --trainer.callbacks EarlyStoping", "EarlyStoping: did you mean EarlyStopping?"),
        ("fit vit --trainer.callbacks EarlyStopping", "the following arguments are required: monitor"),
        ("fit vit --trainer.callbacks [{class_path:os.system}]", "trainer.callbacks: "),
        ("fit vit --model tasks.vit.task.ViTModule", "model: "),
        ("fit vit --model.num_classes 3", "model.num_classes is no flag"),
        ("fit vit --data.image_size 16", "data.image_size is no flag"),
        ("fit vit --ckpt_path x.ckpt", "use --checkpoint with validate and test, --init or --resume with fit"),
        ("fit vit --checkpoint x.ckpt", "unknown flag --checkpoint: fit takes --init or --resume"),
        ("test vit --checkpoint x.ckpt --init y", "unknown flag --init: only fit takes it"),
        ("predict vit x.png --checkpoint y -k 3", "unknown flag -k: expected one of: "),
        ("predict vit x.png --checkpoint nowhere", "nowhere: no such file or folder"),
        ("predict vit x.png --checkpoint y --device meta", "--device meta: "),
        ("fit vit --init x --resume y", "--resume and --init: expected one of them"),
        ("fit vit --init=", "--init is empty, expected a run folder"),
        ("fit vit --resume=", "--resume is empty, expected a run folder"),
        ("fit vit --data.seed -1", "seed is -1, expected at least 0"),
        ("fit vit --data.split_seed -1", "split_seed is -1, expected at least 0"),
        ("fit vit --trainer.devices x --trainer.accelerator cpu", "should be an int > 0"),
        ("fit vit --model.image_size 1000000", "out of memory, a smaller model or data.batch_size is needed: "),
        ("test vit", "the following arguments are required: checkpoint"),
        ("test vit --checkpoint nowhere", "nowhere: no such file or folder"),
        ("fit vit --init nowhere", "nowhere: no such file or folder"),
        ("fit vit --resume nowhere", "--resume nowhere: no run there"),
        ("fit vit --freeze encoder.*", "--freeze needs --init"),
        ("fit vit --data.root nowhere", "data root nowhere: no such folder"),
        ("fit vit --config nowhere.yaml", "config: File does not exist"),
        ("fit vit --trainer.strategy dpp", "unknown value dpp: did you mean ddp?"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command.split())
    assert message in result.error
    assert result.code == 2
    assert not list(tmp_path.rglob("*/*/*")), "a mistyped command leaves a run folder"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {depht: 3}", "my.yaml: unknown key model.depht: did you mean model.depth?"),
        ("modle: {depth: 3}", "my.yaml: unknown key modle.depth: did you mean model.depth?"),
        ("model: {num_classes: 3}", "my.yaml: model.num_classes is no flag"),
        ("data: {image_size: 16}", "my.yaml: data.image_size is no flag"),
        ("", "my.yaml: holds nothing, expected options by name"),
        ("- 3", "my.yaml: holds '[3]', expected options by name"),
        ("model:", "my.yaml: model is nothing, expected options by name"),
        ("lr: 3", "my.yaml: unknown key lr: see --help"),
        ("\udcff", "my.yaml: no text in UTF-8"),
        ("model: {depth: abc}", "my.yaml: model.depth: unknown value abc: expected int"),
        ("model: [\n depth: 3", "my.yaml: Problems parsing config"),
        ("trainer: {callbacks: [{class_path: os.system}]}", "trainer.callbacks: "),
        ("model: !!python/object/apply:os.system [ls]", "my.yaml: "),
    ],
)
def test_a_mistake_in_a_config_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text, errors="surrogateescape")
    result = run("fit", "vit", "--config", "my.yaml")
    assert message in result.error
    assert result.code == 2


def test_a_config_makes_nothing_run_but_what_a_trainer_takes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(
        "model: {attention_options: {window: {class_path: io.FileIO, init_args: {file: made, mode: w}}}}"
    )
    assert run("fit", "vit", "--config", "my.yaml").code == 2
    assert not Path("made").exists()


def test_where_no_folder_can_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("fit", "vit", "--trainer.default_root_dir", tmp_path / "file")
    assert f"trainer.default_root_dir {tmp_path / 'file'}: no folder can be made there" in result.error
    assert result.code == 2


def test_a_mistake_that_lightning_finds_while_it_trains_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    callback = "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/acc"
    result = run("fit", "vit", *SMALL, *callback, "--trainer.max_epochs", "1")
    assert "Early stopping conditioned on metric `val/acc` which is not available" in result.error
    assert result.code == 1


def test_a_process_that_lost_the_others_says_so() -> None:
    from tasks.trainer_cli import _explain

    lost = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:21419")
    assert _explain(lost) == "another process of this run is gone: it has told why, or was killed"
    assert _explain(RuntimeError("a bug")) is None


def test_a_logger_whose_package_is_missing_is_told_with_the_command() -> None:
    from tasks.trainer_cli import _explain

    lacking = ValueError("Errors: - Requirement 'wandb>=0.12.10' not met. HINT: Try\n Given value: Namespace(...)")
    assert _explain(lacking) == "wandb>=0.12.10 is not installed: pip install 'wandb>=0.12.10'"


def test_a_broken_plug_in_is_one_line_and_the_rest_works(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, _ = registry.discover()
    monkeypatch.setattr(registry, "discover", lambda: (tasks, ["task 'x' of y does not load: ImportError: z"]))
    result = run("tasks")
    assert result.err == "multimodal: warning: task 'x' of y does not load: ImportError: z\n"
    assert result.code == 0


def test_the_traceback_of_a_mistake_on_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIMODAL_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown task"):
        run("fit", "vti")


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import tasks.trainer_cli

    def broken(*_: object) -> int:
        raise TypeError("a bug")

    monkeypatch.setattr(tasks.trainer_cli, "run", broken)
    with pytest.raises(TypeError, match="a bug"):
        run("fit", "vit")


def test_output_that_no_one_reads_to_the_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-u", "-m", "tasks.cli", "--help"]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert "Traceback" not in result.stderr
    assert result.returncode == 141
