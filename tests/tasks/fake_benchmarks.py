"""Works and peers by which the frame of benchmarks is tested: named by records, and imported by other processes."""

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from tasks.registry import Task
from tasks.workload import Data, Peer, Setting, Subject, Workload, ready

WIDTH = 32


def task(name: str, **fields: Any) -> Task:
    """A record of which the benchmark alone is real."""
    made = {"help": "a task", "module": "m:M", "data": "d:D", "config": "c.yaml", "metric": "loss", "example": "e:e"}
    return Task(name=name, mode="min", **(made | {"benchmark": "tests.tasks.fake_benchmarks:works"} | fields))


def _data() -> Data:
    return {"x": torch.randn(4, WIDTH), "note": "no tensor"}


def _train(setting: Setting, data: Data) -> Subject:
    model = ready(nn.Linear(WIDTH, WIDTH), setting, trains=True)
    return Subject(run=lambda: model(data["x"]).square().mean(), model=model)


def _infer(setting: Setting, data: Data) -> Subject:
    model, x = ready(nn.Linear(WIDTH, WIDTH), setting), data["x"].to(setting.dtype)
    return Subject(run=lambda: model(x), model=model)


def _told(seconds: float) -> str:
    return "less than a second" if seconds < 1 else "more"


def works(size: str) -> list[Workload]:
    given: dict[str, Any] = {"model": f"linear {size}", "batch": 4, "data": _data}
    return [
        Workload(**given, name="train", ours=_train, trains=True, lr=0.1),
        Workload(**given, name="inference", ours=_infer, items=8, unit="rows", told=_told),
    ]


def peers(work: Workload, setting: Setting) -> list[Peer]:
    def slow(data: Data) -> Subject:
        subject = _train(setting, data) if work.trains else _infer(setting, data)

        def run() -> Any:
            time.sleep(0.005)
            return subject.run()

        return Subject(run=run, model=subject.model)

    def same(data: Data) -> Subject:
        return _train(setting, data) if work.trains else _infer(setting, data)

    def broken(data: Data) -> Subject:
        raise RuntimeError("a peer's bug")

    def larger(data: Data) -> Subject:
        return Subject(run=same(data).run, model=nn.Linear(1, 1) if not work.trains else nn.Linear(WIDTH, WIDTH + 1))

    def missing(data: Data) -> Subject:
        import no_such_package  # type: ignore[import-not-found]

        raise AssertionError(no_such_package)

    def unable(data: Data) -> Subject:
        raise ValueError("it knows\nno rows")

    every = {
        "twin": {"slow": slow, "broken": broken, "quick": same},
        "absent": {"only": missing},
        "sleeper": {"slow": slow},
    }
    if not work.trains:
        every |= {"other": {"only": larger}, "unable": {"one": unable, "two": unable}}
    return [Peer(name=name, package="torch", forms=forms) for name, forms in every.items()]


def broken_peers(work: Workload, setting: Setting) -> list[Peer]:
    def broken(data: Data) -> Subject:
        raise RuntimeError("a peer's\nbug")

    return [Peer(name="wrong", package="torch", forms={"one": broken, "two": broken})]


def unfit_peers(work: Workload, setting: Setting) -> list[Peer]:
    """Packages that are there, but cannot be imported, and one that can."""

    def fails(error: Exception, data: Data) -> Subject:
        raise error

    def same(data: Data) -> Subject:
        return _train(setting, data) if work.trains else _infer(setting, data)

    errors = {
        "broken": ImportError("libbroken.so: cannot open\nshared object file"),
        "newer": SyntaxError("invalid syntax"),
        "unnamed": ModuleNotFoundError("it wants something"),
    }
    found = [Peer(name=name, package=name, forms={"one": partial(fails, error)}) for name, error in errors.items()]
    return [*found, Peer(name="twin", package="torch", forms={"one": same})]


def compiling_peers(work: Workload, setting: Setting) -> list[Peer]:
    """One whose faster form takes its time at first."""

    def late(data: Data, first: float, others: float) -> Subject:
        subject = _train(setting, data) if work.trains else _infer(setting, data)
        seconds = iter([first])

        def run() -> Any:
            time.sleep(next(seconds, others))
            return subject.run()

        return Subject(run=run, model=subject.model)

    forms = {"as it is": partial(late, first=0.01, others=0.01), "compiled": partial(late, first=0.05, others=0.0)}
    return [Peer(name="late", package="torch", forms=forms)]


def broken_works(size: str) -> list[Workload]:
    def ours(setting: Setting, data: Data) -> Subject:
        def run() -> None:
            raise RuntimeError("a bug in\nthe middle")

        return Subject(run=run, model=None)

    first, second = works(size)
    return [first, Workload(model="broken", name="inference", batch=1, data=_data, ours=ours), second]


def no_works(size: str) -> list[Workload]:
    raise ValueError("no works today")


def stopped_works(size: str) -> list[Workload]:
    def ours(setting: Setting, data: Data) -> Subject:
        raise KeyboardInterrupt

    first, second = works(size)
    return [first, Workload(model="stopped", name="inference", batch=1, data=_data, ours=ours), second]


def hungry_works(size: str) -> list[Workload]:
    """Two that need no memory and 256 MiB, one that fails, one whose process dies, and one that needs much at first."""

    def needs(count: int) -> Any:
        def ours(setting: Setting, data: Data) -> Subject:
            return Subject(run=lambda: torch.ones(count).sum(), model=None)

        return ours

    def fails(setting: Setting, data: Data) -> Subject:
        raise ValueError("no such\nthing")

    def dies(setting: Setting, data: Data) -> Subject:
        import os

        os._exit(3)

    def builds(setting: Setting, data: Data) -> Subject:
        torch.ones(1 << 26).sum()
        return needs(1)(setting, data)  # type: ignore[no-any-return]

    each = [needs(1), needs(1 << 26), fails, dies, builds]
    return [Workload(model="hungry", name="work", batch=1, data=_data, ours=ours) for ours in each]
