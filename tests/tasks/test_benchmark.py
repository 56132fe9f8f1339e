"""`multimodal benchmark`: what is measured, what is written, and what happens when something goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import benchmark, benchmark_charts, benchmark_json, benchmark_memory, benchmark_rows, registry
from tasks.benchmark_json import OURS, Entry, Report, Row
from tasks.benchmark_memory import Job, data_of, peak_memory
from tasks.machine import Machine
from tasks.registry import Task
from tasks.timing import Runner
from tasks.workload import Setting, parameters_of
from tests.tasks.commands import ROOT, Run
from tests.tasks.fake_benchmarks import task as fake

CPU = torch.device("cpu")
MACHINE = Machine(
    name="a machine",
    device="cpu",
    system="Linux",
    python="3",
    torch="2",
    cores=1,
    threads=1,
    load=0.0,
    matmul={"32": 1e11, "bf16": 2e11},
    bandwidth=1e10,
)
PNG = b"\x89PNG"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not measured, nor is memory."""
    monkeypatch.setattr(benchmark, "describe", lambda device, precisions: MACHINE)
    monkeypatch.setattr(benchmark_rows, "peak_memory", lambda job: 1000)


@pytest.fixture
def tasks(quick: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Task]:
    """The tasks that there are, to be filled."""
    found: dict[str, Task] = {}
    monkeypatch.setattr(registry, "discover", lambda: (found, []))
    return found


def measured(run: Run, folder: Path, *arguments: object, code: int = 0) -> Report:
    """What a command wrote that ends with this code."""
    place = folder / "measured.json"
    result = run("benchmark", "--rounds", 2, "--json", place, *arguments)
    assert result.code == code, result.err
    assert "Traceback" not in result.err
    return benchmark_json.read(place)


# ------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("name", registry.discover()[0])
def test_every_work_of_every_task_runs_in_both_precisions(name: str) -> None:
    task = registry.get(name)
    for work in task.load(str(task.benchmark))("tiny"):
        for dtype in (torch.float32, torch.bfloat16):
            setting = Setting(device=CPU, dtype=dtype)
            data = data_of(work, setting)
            runner = Runner(work.ours(setting, data), work, setting)
            laps = runner()
            assert len(laps) == (3 if work.trains else 1), work.name
            assert min(laps) > 0
            parameters = parameters_of(runner.subject)
            bare = work.name == "log-mel" or work.name.startswith("losses alone")
            assert bare if parameters is None else parameters > 1000


@pytest.mark.parametrize("size", ["tiny", "published"])
@pytest.mark.parametrize("name", registry.discover()[0])
def test_no_two_works_of_a_task_are_the_same(name: str, size: str) -> None:
    task = registry.get(name)
    works = task.load(str(task.benchmark))(size)
    assert any(work.trains for work in works)
    assert any(work.batch == 1 for work in works)
    assert len({(work.model, work.name, work.batch) for work in works}) == len(works)


def test_the_data_of_a_work_are_the_same_each_time() -> None:
    (work, *_) = registry.get("vit").load("tasks.vit.bench:workloads")("tiny")
    setting = Setting(device=CPU, dtype=torch.float32)
    assert data_of(work, setting)["image"].equal(data_of(work, setting)["image"])


def test_a_task_from_end_to_end(run: Run, tmp_path: Path) -> None:
    markdown, page = tmp_path / "b.md", tmp_path / "b.html"
    report = measured(run, tmp_path, "vit", "--markdown", markdown, "--html", page)
    assert report.complete
    assert report.machine.bandwidth > 1e8
    assert report.machine.matmul.keys() == {"32", "bf16"}
    assert [(row.work, row.batch, row.precision) for row in report.rows] == [
        (work, batch, precision)
        for work, batch in (("train", 8), ("inference", 1), ("inference", 16))
        for precision in ("32", "bf16")
    ] + [("AdamW step", 1, "32")]
    for row in report.rows:
        (entry,) = row.entries
        trains = row.work == "train"
        assert entry.name == OURS
        assert entry.parameters == 202_058
        assert len(entry.rounds_ms) == 2
        assert entry.median_ms is not None
        assert entry.low_ms <= entry.median_ms <= entry.high_ms
        assert entry.items_per_second == pytest.approx(1000 * row.batch / entry.median_ms)
        assert (entry.backward_ms is not None) == trains
        assert 100 * 2**20 < entry.peak_memory_bytes < 4 * 2**30
        if row.work == "AdamW step":
            assert entry.flops_per_second is None
            continue
        assert entry.flops_per_second == pytest.approx(entry.flops_per_sample * entry.items_per_second)
        assert entry.matmul_fraction == pytest.approx(entry.flops_per_second / report.machine.matmul[row.precision])
    assert markdown.read_text().count("| ours |") == len(report.rows)
    for name in ("speed", "roofline"):
        assert (tmp_path / f"b-{name}.png").read_bytes().startswith(PNG)
        assert f"(b-{name}.png)" in markdown.read_text()
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=\"(?!data:)", text)


@pytest.mark.usefixtures("quick")
def test_another_attention_kernel(run: Run, tmp_path: Path) -> None:
    report = measured(run, tmp_path, "vit", "--attention", "naive", "--precision", "32")
    assert {row.attention for row in report.rows} == {"naive"}
    assert not any(row.errors for row in report.rows)


# ------------------------------------------------------------------------------------------------------------- peers


def test_peers_run_in_their_fastest_form_and_missing_ones_are_named(
    run: Run, tmp_path: Path, tasks: dict[str, Task]
) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32", "--html", tmp_path / "b.html")
    assert report.skipped == ("absent: no_such_package is not installed",)
    assert not any(row.notes for row in report.rows)
    assert report.packages["torch"] == torch.__version__.split("+")[0] or report.packages["torch"]
    train, inference = report.rows
    assert [entry.name for entry in train.entries] == [OURS, "twin", "sleeper"]
    assert [entry.form for entry in train.entries] == [None, "quick", "slow"]
    ours, twin, sleeper = train.entries
    assert ours.ratio is None
    assert sleeper.ratio == pytest.approx(sleeper.median_ms / ours.median_ms)
    assert sleeper.ratio_low > 1
    assert sleeper.forward_ms > 5
    assert twin.parameters == ours.parameters
    other, unable = inference.entries[-2:]
    assert other.notes[-2:] == ("-1,054 parameters", "less than a second")
    assert inference.entries[0].notes[-1] == "less than a second"
    assert (unable.median_ms, unable.error) == (None, None)
    assert unable.notes == ("not compared: it knows no rows",)
    assert (tmp_path / "b.html").read_text().count("data:image/png;base64,") == 3


def test_peers_that_cannot_be_imported_are_named_and_skipped(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:unfit_peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32")
    assert report.skipped == (
        "broken: broken cannot be imported (ImportError: libbroken.so: cannot open shared object file)",
        "newer: newer cannot be imported (SyntaxError: invalid syntax)",
        "unnamed: unnamed cannot be imported (ModuleNotFoundError: it wants something)",
    )
    for row in report.rows:
        assert [entry.name for entry in row.entries] == [OURS, "twin"]


def test_without_the_flag_there_are_no_peers(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:peers")
    report = measured(run, tmp_path, "--precision", "32")
    assert [len(row.entries) for row in report.rows] == [1, 1]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_failure_is_a_row_and_the_others_survive(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    for name in ("broken_works", "no_works", "works"):
        tasks[name] = fake(name, benchmark=f"tests.tasks.fake_benchmarks:{name}")
    tasks["lacks"] = fake("lacks", benchmark="no_such_package.bench:works", extra="rl")
    page = tmp_path / "b.html"
    report = measured(run, tmp_path, "--precision", "32", "--html", page, code=1)
    assert report.complete
    assert [row.error for row in report.rows] == [
        None,
        "RuntimeError: a bug in the middle",
        None,
        "ValueError: no works today",
        None,
        None,
        "ValueError: task 'lacks' needs no_such_package: pip install 'multimodal-transformer-suite[rl]'",
    ]
    assert "failed: RuntimeError: a bug in the middle" in page.read_text()


def test_a_peer_that_fails_is_an_entry(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:broken_peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32", code=1)
    for row in report.rows:
        ours, peer = row.entries
        assert ours.error is None
        assert peer.error == "RuntimeError: a peer's bug"


def test_peers_that_cannot_be_asked_are_an_entry(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="no_such_package.peers:peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32", code=1)
    for row in report.rows:
        ours, peers = row.entries
        assert ours.median_ms is not None
        assert (peers.name, peers.error) == ("peers", "ModuleNotFoundError: No module named 'no_such_package'")


def test_a_table_is_printed_where_a_file_cannot_be_written(
    run: Run, tmp_path: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, report: Report) -> None:
        raise OSError(28, "No space left on device", str(path))

    tasks["fake"] = fake("fake")
    monkeypatch.setattr(benchmark_json, "write", full)
    result = run("benchmark", "--precision", "32", "--rounds", 1, "--json", tmp_path / "b.json")
    assert result.code == 1
    assert "No space left on device" in result.error
    assert "linear tiny, train, batch 4" in result.out


def test_a_task_that_is_not_in_benchmarks(run: Run, tasks: dict[str, Task]) -> None:
    tasks |= {"fake": fake("fake"), "bare": fake("bare", benchmark=None)}
    result = run("benchmark", "bare")
    assert result.code == 2
    assert "task 'bare' has no benchmark, expected some of fake" in result.error


def test_compilation_is_not_timed_and_begins_anew_for_each_row(
    run: Run, tmp_path: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr("tasks.timing.SLOW", 40.0)
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:compiling_peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32", "--compile")
    assert len(resets) == len(report.rows) == 2
    for row in report.rows:
        assert row.entries[1].form == "compiled"
        assert row.entries[1].high_ms < 10


def test_what_was_measured_is_written_after_ctrl_c(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["stopped"] = fake("stopped", benchmark="tests.tasks.fake_benchmarks:stopped_works")
    page, markdown = tmp_path / "b.html", tmp_path / "b.md"
    report = measured(run, tmp_path, "--precision", "32", "--html", page, "--markdown", markdown, code=130)
    assert not report.complete
    assert [row.work for row in report.rows] == ["train"]
    for place in (page, markdown):
        assert "Stopped before all was measured" in place.read_text()


def test_ctrl_c_on_the_terminal(tmp_path: Path) -> None:
    place = tmp_path / "b.json"
    command = [sys.executable, "-m", "tasks.cli", "benchmark", "vit", "--rounds", "5", "--json", str(place)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )
    while not place.exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
    _, told = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "rows are measured" in told
    report = benchmark_json.read(place)
    assert not report.complete
    assert 1 <= len(report.rows) < 6


def test_ctrl_c_while_memory_is_measured_keeps_the_times(
    run: Run, tmp_path: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([1000])

    def stopped(job: Job) -> int:
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark_rows, "peak_memory", stopped)
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:compiling_peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32", code=130)
    assert not report.complete
    (row,) = report.rows
    ours, peer = row.entries
    assert ours.peak_memory_bytes == 1000
    assert peer.peak_memory_bytes is None
    assert peer.ratio == pytest.approx(peer.median_ms / ours.median_ms)
    assert peer.flops_per_sample


def test_stopped_before_the_first_row(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["stopped"] = fake("stopped", benchmark="tests.tasks.fake_benchmarks:stopped_works")
    page = tmp_path / "b.html"
    stopped = fake("stopped").load("tests.tasks.fake_benchmarks:stopped_works")("tiny")[1:]
    import tests.tasks.fake_benchmarks as fakes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fakes, "stopped_works", lambda size: stopped)
        report = measured(run, tmp_path, "--html", page, code=130)
    assert report.rows == ()
    assert page.exists()


@pytest.mark.parametrize("wanted", ["32,bf16", "bf16"])
def test_a_precision_that_the_device_lacks(
    run: Run, tmp_path: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    made = torch.ones

    def ones(*size: int, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise TypeError("BFloat16 is not supported\nhere")
        return made(*size, dtype=dtype, **more)

    monkeypatch.setattr(torch, "ones", ones)
    tasks["fake"] = fake("fake")
    if wanted == "bf16":
        result = run("benchmark", "--precision", wanted)
        assert result.code == 2
        assert "it computes in none of --precision bf16 (bf16: BFloat16 is not supported here)" in result.error
        return
    report = measured(run, tmp_path, "--precision", wanted)
    assert report.skipped == ("precision bf16: BFloat16 is not supported here",)
    assert [row.precision for row in report.rows] == ["32", "32"]


def test_what_is_said_of_a_whole_row(
    run: Run, tmp_path: Path, tasks: dict[str, Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.timing.SLOW", 3.0)
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:compiling_peers")
    page, markdown = tmp_path / "b.html", tmp_path / "b.md"
    files = ("--html", page, "--markdown", markdown)
    report = measured(run, tmp_path, "--peers", "--precision", "32", "--rounds", 5, *files)
    cut = "3 of 5 rounds, since one call takes 10 s or more"
    assert [row.notes for row in report.rows] == [(cut,), (cut,)]
    assert [len(row.entries[0].rounds_ms) for row in report.rows] == [3, 3]
    for place in (page, markdown):
        assert f"linear tiny, train, batch 4, fp32: {cut}" in place.read_text()
    compiled = measured(run, tmp_path, "--precision", "32", "--compile")
    assert compiled.rows[0].notes == ("the memory of what is compiled includes torch's compiler",)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vti", "unknown task 'vti': did you mean vit?"),
        ("--precision 64", "--precision 64: unknown '64', expected one of: 32, bf16"),
        ("--size huge", "argument --size: invalid choice: 'huge'"),
        ("--rounds 0", "argument --rounds: '0' is not a whole number of at least 1"),
        ("--attention nave", "attention: no kernel 'nave'; did you mean 'naive'?"),
        ("--device meta", "--device meta: "),
        ("--peer", "unknown flag --peer: did you mean --peers?"),
        ("--json nowhere/b.json", "--json nowhere/b.json: no such folder"),
        ("--html .", "--html .: a folder, expected a file"),
        ("--markdown /proc/b.md", "--markdown /proc/b.md: nothing can be written there"),
        ("--html /dev/null", "--html /dev/null: no file, expected one, or none yet"),
        ("--json b --html ./b", "--json and --html are both b, expected two files"),
        ("--compare a", "argument --compare: expected 2 arguments"),
        ("--compare a b", "a: No such file or directory, expected a file of multimodal benchmark --json"),
        ("--compare a b --json c", "--compare OLD NEW: measures nothing, expected no other argument"),
        ("--compare a b --rounds 3", "--compare OLD NEW: measures nothing, expected no other argument"),
        ("--compare a b vit", "--compare OLD NEW: measures nothing, expected no other argument"),
        ("--compare list.json a", "list.json: JSON of another kind, expected that of multimodal benchmark"),
        ("--compare foreign.json a", "foreign.json: JSON of another kind, expected that of multimodal benchmark"),
        ("--compare newer.json a", "newer.json: version is 2, expected 1"),
        ("--compare cut.json a", "cut.json: no JSON (Unterminated string "),
        ("--compare bytes.json a", "bytes.json: no JSON ("),
        ("--compare deep.json a", "deep.json: no JSON ("),
        ("--compare lacks.json a", "lacks.json: missing field created, command"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.json").write_text("[1]")
    Path("foreign.json").write_text('{"version": 1}')
    Path("newer.json").write_text('{"kind": "multimodal-benchmark", "version": 2}')
    Path("lacks.json").write_text('{"kind": "multimodal-benchmark", "version": 1}')
    Path("cut.json").write_text('{"kind": "multimo')
    Path("deep.json").write_text("[" * 100_000)
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    result = run("benchmark", *command.split())
    assert message in result.error
    assert result.code == 2


# --------------------------------------------------------------------------------------------------------- the rest


def test_the_memory_of_a_fresh_process() -> None:
    setting = Setting(device=CPU, dtype=torch.float32)
    hungry = fake("hungry", benchmark="tests.tasks.fake_benchmarks:hungry_works")
    jobs = [Job(task=hungry, size="tiny", index=index, setting=setting) for index in range(5)]
    little, much = map(peak_memory, jobs[:2])
    assert 0.9 * 2**28 < much - little < 1.3 * 2**28
    if sys.platform == "linux":
        assert abs(peak_memory(jobs[4]) - little) < 0.2 * 2**28
    with pytest.raises(RuntimeError, match=r"^ValueError: no such thing$"):
        peak_memory(jobs[2])
    with pytest.raises(RuntimeError, match="the process that measures memory ended with code 3"):
        peak_memory(jobs[3])


def test_the_memory_of_what_torch_does_not_allocate_on_cuda_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    held = benchmark_memory._forget_peak(device)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    assert benchmark_memory._peak(device, held) == 7
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    with pytest.raises(RuntimeError, match="torch allocates nothing for it"):
        benchmark_memory._peak(device, held)


def drawn() -> Report:
    """Of two works with three peers, in figures that stretch a chart."""
    rows = []
    for work, ratios in (("train", (0.9, 0.31, 8.0)), ("inference", (1.2, 1.7, 1.5))):
        peers = [
            Entry(name=f"peer {ratio}", median_ms=ratio, ratio=ratio, ratio_low=0.9 * ratio, ratio_high=1.1 * ratio)
            for ratio in ratios
        ]
        ours = Entry(name=OURS, median_ms=1.0, items_per_second=41_670.0 if work == "train" else 1.0)
        given: dict[str, Any] = {"task": "fake", "size": "tiny", "model": "linear", "batch": 1, "items": 1.0}
        given |= {"unit": "seconds of audio", "precision": "32", "compile": False, "attention": None}
        rows.append(Row(**given, work=work, entries=(ours, *peers)))
    given = {"created": "", "command": "", "complete": True, "rounds": 1, "machine": MACHINE, "packages": {}}
    return Report(**given, skipped=(), rows=tuple(rows))


def test_a_chart_of_ratios_has_a_bar_for_the_fastest_peer_of_each_work() -> None:
    figure = benchmark_charts._ratio(drawn())
    assert figure is not None
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([0.31 - 1, 0.2])
    assert [text.get_text() for text in axis.texts] == ["0.31 peer 0.31", "1.20 peer 1.2"]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "linear, train, batch 1, fp32",
        "linear, inference, batch 1, fp32",
    ]


@pytest.mark.parametrize("chart", [benchmark_charts._ratio, benchmark_charts._speed])
def test_words_on_charts_are_within_the_picture_and_apart(chart: Any) -> None:
    figure = chart(drawn())
    figure.savefig(BytesIO())
    (axis,) = figure.axes
    ticks = [label.get_window_extent() for label in axis.get_xticklabels(which="both") if label.get_text()]
    left, right = axis.get_window_extent().intervalx
    shown = sorted((box for box in ticks if left <= (box.x0 + box.x1) / 2 <= right), key=lambda box: box.x0)
    assert len(shown) > 1
    assert all(one.x1 < other.x0 for one, other in pairwise(shown))
    for text in axis.texts:
        box = text.get_window_extent()
        assert right < box.x0 < box.x1 <= figure.bbox.x1


def test_two_files_are_compared(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:peers")
    measured(run, tmp_path, "--peers", "--precision", "32")
    old = json.loads((tmp_path / "measured.json").read_text())
    new = json.loads((tmp_path / "measured.json").read_text())
    old["rows"][0]["entries"][0]["median_ms"] = 30.0
    new["rows"][0]["entries"][0]["median_ms"] = 20.0
    new["machine"]["threads"] = 2
    new["rows"][1]["work"] = "prediction"
    del old["rows"][0]["entries"][1]
    for name, content in (("old.json", old), ("new.json", new)):
        (tmp_path / name).write_text(json.dumps(content))
    result = run("benchmark", "--compare", tmp_path / "old.json", tmp_path / "new.json")
    assert result.code == 0
    lines = [re.split(r"  +", line) for line in result.out.splitlines()]
    assert lines[0] == ["task", "model, work", "precision", "who", "old ms", "new ms", "old / new"]
    assert ["fake", "linear tiny, train, batch 4", "32", "ours", "30", "20", "1.50"] in lines
    twin = next(line for line in lines if line[3] == "twin" and "train" in line[1])
    assert (twin[4], twin[6]) == ("–", "not in old")
    assert any("inference" in line[1] and line[6] == "not in new" for line in lines[1:-1])
    assert lines[-1] == [f"threads: 1 in {tmp_path}/old.json, 2 in {tmp_path}/new.json"]


def test_a_file_is_read_as_it_was_written(run: Run, tmp_path: Path, tasks: dict[str, Task]) -> None:
    tasks["fake"] = fake("fake", peers="tests.tasks.fake_benchmarks:peers")
    report = measured(run, tmp_path, "--peers", "--precision", "32")
    again = tmp_path / "again.json"
    benchmark_json.write(again, report)
    assert again.read_bytes() == (tmp_path / "measured.json").read_bytes()
    assert benchmark_json.read(again) == report


def test_the_schema_is_documented() -> None:
    from dataclasses import fields

    text = (Path(registry.__file__).parents[1] / "docs" / "benchmark_schema.md").read_text()
    for kind in (Report, benchmark_json.Row, benchmark_json.Entry, Machine):
        for field in fields(kind):
            assert f"`{field.name}`" in text, field.name
