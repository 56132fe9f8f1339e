"""Which tasks are found, and what happens to those that cannot be used."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tasks import registry
from tasks.registry import Task


def _task(name: str, **fields: Any) -> Task:
    defaults = {"help": "a task", "module": "m:M", "data": "d:D", "config": "c.yaml", "metric": "loss", "mode": "min"}
    return Task(name=name, **({"example": "e:e"} | defaults | fields))


@pytest.fixture(params=registry.discover()[0].values(), ids=lambda task: task.name)
def task(request: pytest.FixtureRequest) -> Task:
    return request.param


def test_what_a_record_names_exists(task: Task) -> None:
    from tasks.base import TaskModule
    from tasks.data import TaskData

    assert issubclass(task.load(task.module), TaskModule)
    assert issubclass(task.load(task.data), TaskData)
    assert task.load(task.module).task == task.name
    assert callable(task.load(task.example))
    for function in (task.benchmark, task.peers):
        assert function is None or callable(task.load(function))
    for form in task.formats:
        assert callable(form.load(form.write))
        assert callable(form.load(form.open))
    for verb in (*registry.VERBS, *registry.ACROSS, *task.verbs):
        module = task.load(verb.module)
        assert callable(module.add_arguments)
        assert callable(module.run)


def test_the_recipe_is_found_and_has_nothing_but_known_groups(task: Task) -> None:
    recipe = yaml.safe_load(task.config_path.read_text())
    assert recipe.keys() <= {"seed_everything", "trainer", "model", "data"}


def test_the_folder_is_the_name(task: Task) -> None:
    assert (Path(registry.__file__).parent / task.name / "__init__.py").is_file()


def test_get_names_the_nearest() -> None:
    assert registry.get("vit").name == "vit"
    with pytest.raises(ValueError, match=r"unknown task 'vitt': did you mean vit\?"):
        registry.get("vitt")


def test_a_missing_recipe_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nope\.yaml"):
        _ = _task("x", config="nope.yaml").config_path


def test_a_recipe_of_another_package() -> None:
    assert _task("x", config="multimodal:py.typed").config_path.name == "py.typed"


def test_a_missing_extra_is_told_with_the_command() -> None:
    needs = _task("x", module="no_such_library.task:Module", extra="rl")
    with pytest.raises(ValueError, match=r"needs no_such_library: pip install 'multimodal-transformer-suite\[rl\]'"):
        needs.load(needs.module)
    with pytest.raises(ModuleNotFoundError):
        _task("x").load("no_such_library.task:Module")


def _entry(name: str, loaded: object) -> SimpleNamespace:
    def load() -> object:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    return SimpleNamespace(name=name, load=load, dist=SimpleNamespace(name="other"), value="other:TASK")


@pytest.fixture
def _fresh_registry() -> Iterator[None]:
    registry.discover.cache_clear()
    yield
    registry.discover.cache_clear()


@pytest.mark.usefixtures("_fresh_registry")
def test_other_distributions_add_tasks_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        _entry("good", _task("good")),
        _entry("broken", ImportError("no module\nnamed x")),
        _entry("vit", _task("vit")),
        _entry("wrong", "a string"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "multimodal.tasks" else [])
    found, problems = registry.discover()
    assert {"good", "vit"} <= found.keys()
    assert found["vit"].module == "tasks.vit.task:ViTModule"
    assert problems == [
        "task 'broken' of other does not load: ImportError: no module named x",
        "task 'vit' of other is left out: there is a task 'vit' already",
        "task 'wrong' of other is not a tasks.registry.Task but a str",
    ]
