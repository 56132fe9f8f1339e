"""Peak memory of a work in a process of its own, which has done nothing else."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tasks.errors import one_line
from tasks.peers import forget_exports
from tasks.registry import Task
from tasks.timing import Runner
from tasks.workload import Data, Peer, Setting, Workload, to_device

_LONGEST = 1200.0
"""Seconds that a process may take, compilation included."""
_FORGET = Path("/proc/self/clear_refs")
"""By which Linux forgets the most memory that a process ever had: proc(5)."""
_SHORT = 10.0
"""Seconds in which it ends once it has answered."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who does which work."""

    task: Task
    size: str
    index: int
    """Of the task's workloads of this size."""
    setting: Setting
    peer: str | None = None
    """None = ours."""
    form: str | None = None


def data_of(work: Workload, setting: Setting) -> Data:
    """The same data each time."""
    torch.manual_seed(0)
    return to_device(work.data(), setting.device)


def peers_of(task: Task, work: Workload, setting: Setting) -> list[Peer]:
    """The published implementations of a work."""
    return [] if task.peers is None else list(task.load(task.peers)(work, setting))


def peak_memory(job: Job) -> int:
    """Bytes; RuntimeError in one line where the process fails.

    All of a process's memory, with the libraries that it needs; on CUDA what torch allocates on the device. Linux and
    CUDA can leave out what it took to build who does the work.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":  # of a process that has imported what all need, and computed nothing
        context.set_forkserver_preload(["tasks.benchmark_memory", "tasks.base", "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(job, torch.get_num_threads(), sender), daemon=True)
    with _deaf() if method == "forkserver" else nullcontext():
        process.start()
    sender.close()
    try:
        if not receiver.poll(_LONGEST):
            raise RuntimeError(f"no answer within {_LONGEST:.0f} s")
        found = receiver.recv()
        process.join(_SHORT)  # by itself, so that it tidies up
    except EOFError:
        process.join(_SHORT)
        raise RuntimeError(f"the process that measures memory ended with code {process.exitcode}") from None
    finally:
        process.terminate()
        process.join()
    if isinstance(found, str):
        raise RuntimeError(found)
    return int(found)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started meanwhile do not hear Ctrl-C, which the terminal sends to all."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _measure(job: Job, threads: int, sender: Connection) -> None:
    """In the process: do the work once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks for it ends it
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(threads)
    try:
        work = job.task.load(str(job.task.benchmark))(job.size)[job.index]
        data = data_of(work, job.setting)
        if job.peer is None:
            subject = work.ours(job.setting, data)
        else:
            (peer,) = (peer for peer in peers_of(job.task, work, job.setting) if peer.name == job.peer)
            subject = peer.forms[str(job.form)](data)
            forget_exports()  # this process ends without tidying up
        runner = Runner(subject, work, job.setting)
        held = _forget_peak(job.setting.device)  # peers are built by way of a model of ours
        runner()
        sender.send(_peak(job.setting.device, held))
    except Exception as error:  # whatever it is, it is the other process's to tell
        sender.send(f"{type(error).__name__}: {one_line(error)}")


def _forget_peak(device: torch.device) -> int:
    """On CUDA the bytes that torch has allocated."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if _FORGET.exists():
        _FORGET.write_text("5")
    return 0


def _peak(device: torch.device, held: int) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        if peak == held:  # as of faster-whisper, which allocates by itself
            raise RuntimeError("torch allocates nothing for it")
        return peak
    import resource  # there is none on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
