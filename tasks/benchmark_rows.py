"""Measuring the rows of a benchmark: building who does a work, choosing peers' forms, timing, counting."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from tasks.benchmark_json import OURS, Entry, Row
from tasks.benchmark_memory import Job, data_of, peak_memory, peers_of
from tasks.errors import one_line
from tasks.flops import flops_of
from tasks.machine import PRECISIONS, Machine
from tasks.registry import Task
from tasks.timing import DOUBTFUL, PARTS, SLOW, Runner, Times, interleave, trial
from tasks.workload import Data, Peer, Setting, Workload, parameters_of, weight_bytes

_LATENCY_CALLS = 3
"""Least calls in a round of a batch of 1, of whose times percentiles are told."""


@dataclass
class Bench:
    """What is measured, and what came up while it was.

    Args:
        sizes: of the models, as `workloads` takes them.
        precisions: names of `PRECISIONS`.
        peers: whether published implementations are measured beside.
        rounds: of each row.
        device: where all of it runs.
        compile: whether models are compiled.
        attention: kernel of our attention; None = that of each config.
        machine: by whose peaks figures are measured.
        say: is told, line by line, what happens.
    """

    sizes: Sequence[str]
    precisions: Sequence[str]
    peers: bool
    rounds: int
    device: torch.device
    compile: bool
    attention: str | None
    machine: Machine
    say: Callable[[str], None]
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the peers so far."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Peers and precisions that cannot be had, and why."""
    stopped: bool = False
    """By Ctrl-C, while something was counted whose times are a row nevertheless."""

    def rows(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """All rows, in the order of tasks, sizes, precisions and works. A task that fails is a row as well."""
        for task in tasks:
            for size in self.sizes:
                try:
                    works = list(task.load(str(task.benchmark))(size))
                except Exception as error:  # the other tasks are measured nevertheless
                    yield self._lost(task, size, error)
                    continue
                for index, work in enumerate(works):
                    for precision in self.precisions:
                        if precision == "32" or not work.only_float32:
                            if self.compile:  # else the code that models share would be compiled for a few rows alone
                                torch.compiler.reset()
                            yield self._row(task, size, index, work, precision)
                            if self.stopped:
                                raise KeyboardInterrupt
                            gc.collect()

    def _lost(self, task: Task, size: str, error: Exception) -> Row:
        self.say(f"{task.name}: {_told(error)}")
        return Row(
            task=task.name,
            size=size,
            model=task.name,
            work="all",
            batch=0,
            unit="samples",
            items=0.0,
            precision=",".join(self.precisions),
            compile=self.compile,
            attention=self.attention,
            error=_told(error),
        )

    def _row(self, task: Task, size: str, index: int, work: Workload, precision: str) -> Row:
        compiles = self.compile and work.compiles
        setting = Setting(device=self.device, dtype=PRECISIONS[precision], compile=compiles, attention=self.attention)
        row = Row(
            task=task.name,
            size=size,
            model=work.model,
            work=work.name,
            batch=work.batch,
            unit=work.unit,
            items=float(work.amount),
            precision=precision,
            compile=compiles,
            attention=self.attention,
        )
        title = f"{task.name}: {work.model}, {work.name}, batch {work.batch}, {precision}"
        try:
            measured = self._entries(Job(task=task, size=size, index=index, setting=setting), work, precision, title)
        except Exception as error:  # as many kinds as there are tasks; the other rows are measured nevertheless
            self.say(f"{title}: {_told(error)}")
            return replace(row, error=_told(error))
        return replace(row, entries=tuple(measured), notes=tuple(self._notes(row, measured)))

    def _entries(self, job: Job, work: Workload, precision: str, title: str) -> list[Entry]:
        setting = job.setting
        data = data_of(work, setting)
        torch.manual_seed(0)
        runners = {OURS: Runner(work.ours(setting, data), work, setting)}
        jobs = {OURS: job}
        runners[OURS]()  # before the peers are built, which may take long
        theirs = replace(setting, compile=self.compile)  # they may gain by it where ours is not compiled
        peers, failed = self._peers(job.task, work, theirs, title)
        for peer in peers:
            try:
                form, runners[peer.name] = self._fastest(peer, work, theirs, data)
                jobs[peer.name] = replace(job, setting=theirs, peer=peer.name, form=form)
                self._note_version(peer.package)
            except (ImportError, SyntaxError) as error:  # of a package that is broken, or for another Python
                self._skip(peer, error)
            except ValueError as error:
                failed.append(Entry(name=peer.name, notes=(f"not compared: {one_line(error)}",)))
            except Exception as error:  # a peer's own; the others are measured nevertheless
                self.say(f"{title}: {peer.name}: {_told(error)}")
                failed.append(Entry(name=peer.name, error=_told(error)))
        least = _LATENCY_CALLS if work.batch == 1 and not work.trains else 1
        told = f"{title}: {', '.join(runners)}"
        times = interleave(
            runners, self.rounds, least_calls=least, told=lambda seconds: self.say(f"{told}, about {seconds:.0f} s")
        )
        entries = {name: self._timed(name, runners, times, jobs[name]) for name in runners}
        try:
            model = runners[OURS].subject.model
            moved = None if model is None else weight_bytes(work, model)  # peers of the same size move as much
            for name, runner in runners.items():
                entries[name] = self._counted(entries[name], runner, moved, precision)
            for name, one in jobs.items():
                entries[name] = _weighed(entries[name], one)
        except KeyboardInterrupt:  # what took long is kept
            self.stopped = True
        return [*entries.values(), *failed]

    def _peers(self, task: Task, work: Workload, setting: Setting, title: str) -> tuple[list[Peer], list[Entry]]:
        """The peers of a work, and who has failed already."""
        try:
            return (peers_of(task, work, setting) if self.peers else []), []
        except Exception as error:  # the task's, or of a package of another version; ours is measured nevertheless
            self.say(f"{title}: peers: {_told(error)}")
            return [], [Entry(name="peers", error=_told(error))]

    def _fastest(self, peer: Peer, work: Workload, setting: Setting, data: Data) -> tuple[str, Runner]:
        """The form of a peer that is the fastest in a short trial, and a runner of it, which has warmed up.

        Raises:
            ValueError: no form can do this work; where one failed in another way, its own error.
        """
        fastest: list[tuple[float, str, Runner]] = []
        errors: list[Exception] = []

        def tried(form: str) -> tuple[float, str, Runner]:
            torch.manual_seed(0)
            runner = Runner(peer.forms[form](data), work, setting)
            if setting.compile:  # which takes longer than many a call, and is not timed
                runner()
            return trial(runner) if len(peer.forms) > 1 else sum(runner()), form, runner

        for form in peer.forms:
            try:
                fastest = [min([*fastest, tried(form)], key=lambda one: one[0])]
            except (ImportError, SyntaxError):
                raise
            except Exception as error:  # this form is not for this work
                errors.append(error)
            gc.collect()
        if not fastest:
            for found in errors:
                if not isinstance(found, ValueError):
                    raise found
            raise ValueError("; ".join(dict.fromkeys(map(one_line, errors))) or "it has no form for this work")
        _, best, runner = fastest[0]
        return best, runner

    def _note_version(self, package: str) -> None:
        try:
            self.packages[package] = version(package)
        except PackageNotFoundError:
            self.packages[package] = "(not installed as a package)"

    def _skip(self, peer: Peer, error: Exception) -> None:
        if peer.name not in self.skipped:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            cannot = f"{peer.package} cannot be imported ({_told(error)})"
            self.skipped[peer.name] = f"{missing} is not installed" if missing else cannot
            self.say(f"{peer.name} is skipped: {self.skipped[peer.name]}")

    def _notes(self, row: Row, entries: Sequence[Entry]) -> Iterator[str]:
        """What is to be known of a whole row."""
        done = len(entries[0].rounds_ms)
        if done < self.rounds:
            yield f"{done} of {self.rounds} rounds, since one call takes {SLOW / 1000:.0f} s or more"
        compiled = row.compile or any("compiled" in (entry.form or "") for entry in entries)
        if compiled and self.device.type != "cuda":
            yield "the memory of what is compiled includes torch's compiler"

    def _timed(self, name: str, runners: dict[str, Runner], times: dict[str, Times], job: Job) -> Entry:
        """What follows from the times."""
        runner, own = runners[name], times[name]
        work, seconds = runner.work, own.median / 1000
        notes = [f"rounds differ by more than {DOUBTFUL:.0%}"] if own.doubtful else []
        parameters, expected = parameters_of(runner.subject), parameters_of(runners[OURS].subject)
        if parameters is not None and expected is not None and parameters != expected:
            notes.append(f"{parameters - expected:+,} parameters")
        if work.told is not None:
            notes.append(work.told(seconds))
        ratios = [theirs / ours for theirs, ours in zip(own.rounds, times[OURS].rounds, strict=True)]
        parts = own.parts if work.trains else [None] * len(PARTS)
        return Entry(
            name=name,
            form=job.form,
            parameters=parameters,
            rounds_ms=tuple(round(ms, 4) for ms in own.rounds),
            median_ms=own.median,
            low_ms=min(own.rounds),
            high_ms=max(own.rounds),
            forward_ms=parts[0],
            backward_ms=parts[1],
            optimizer_ms=parts[2],
            p50_ms=own.percentile(0.5),
            p95_ms=own.percentile(0.95),
            items_per_second=work.amount / seconds,
            real_time_factor=None if work.audio_seconds is None else seconds / work.audio_seconds,
            ratio=None if name == OURS else own.median / times[OURS].median,
            ratio_low=None if name == OURS else min(ratios),
            ratio_high=None if name == OURS else max(ratios),
            notes=tuple(notes),
        )

    def _counted(self, entry: Entry, runner: Runner, moved: float | None, precision: str) -> Entry:
        """With operations and bytes, and what they are of the machine's peaks."""
        model, work, seconds = runner.subject.model, runner.work, float(entry.median_ms or 0) / 1000
        if model is None:
            return entry
        notes = list(entry.notes)
        flops = _tried("operations", lambda: flops_of(runner), notes)
        return replace(
            entry,
            flops_per_sample=flops and flops / work.batch,
            flops_per_second=flops and flops / seconds,
            matmul_fraction=flops and flops / seconds / self.machine.matmul[precision],
            weight_bytes=moved,
            bandwidth_fraction=moved / seconds / self.machine.bandwidth if moved and work.steps > 1 else None,
            notes=tuple(notes),
        )


def _weighed(entry: Entry, job: Job) -> Entry:
    """With the memory of a fresh process."""
    notes = list(entry.notes)
    memory = _tried("memory", lambda: peak_memory(job), notes)
    return replace(entry, peak_memory_bytes=memory, notes=tuple(notes))


def _tried(what: str, measure: Callable[[], int], notes: list[str]) -> int | None:
    """What is measured beside the time; where that fails, None and a note."""
    try:
        return measure()
    except Exception as error:  # a form that torch's counter cannot look into, a process that found no memory
        notes.append(f"{what} not measured: {_told(error)}")
        return None


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"[:300]
