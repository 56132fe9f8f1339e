"""The doors of the house (docs/architecture.md): who may import whom, read off the sources."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"lightning", "lightning_fabric", "pytorch_lightning", "jsonargparse"}

# The layers of `multimodal`, and which others each may import. The longest prefix of a module's name decides.
ATTENTION = {"multimodal.attention", "multimodal.attention.kernels", "multimodal.attention.masks", "multimodal.linear"}
LAYERS = {
    "multimodal": set(),
    "multimodal.linear": set(),
    "multimodal.attention.masks": set(),
    "multimodal.attention.kernels": {"multimodal.attention.masks"},
    "multimodal.attention": ATTENTION,
    "multimodal.blocks": ATTENTION,
    "multimodal.ctc": set(),
    "multimodal.models": ATTENTION | {"multimodal.blocks", "multimodal.ctc"},
    "multimodal.generate": ATTENTION,
    "multimodal.quantize": {"multimodal.linear", "multimodal.models"},
    "multimodal.data": set(),
    "multimodal.pretrained": ATTENTION | {"multimodal.blocks", "multimodal.models"},
}


class Source:
    """One module of the two packages: its name and what it imports, everywhere and at module level."""

    def __init__(self, path: Path, root: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.tree = ast.parse(path.read_text())
        self.imports = [name for node in ast.walk(self.tree) for name in self._targets(node)]
        self.module_level = [name for node in _executed_on_import(self.tree) for name in self._targets(node)]

    def _targets(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        base = node.module or ""
        if node.level:
            package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, base] if base else package)
        # `from a import b` may import the module a.b; where b is a mere name, a.b lies in the same layer as a.
        return [f"{base}.{alias.name}" for alias in node.names]


def _executed_on_import(tree: ast.Module) -> list[ast.AST]:
    """All nodes outside function bodies and outside `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
    return found


def sources(root: Path) -> list[Source]:
    return [
        Source(path, root) for package in ("multimodal", "tasks") for path in sorted((root / package).rglob("*.py"))
    ]


def _layer(name: str) -> str:
    return max((layer for layer in LAYERS if name == layer or name.startswith(layer + ".")), key=len)


def _task_folders(root: Path) -> set[str]:
    return {path.parent.name for path in (root / "tasks").glob("*/__init__.py")}


def library_violations(source: Source) -> list[str]:
    """Arrows inside `multimodal`, and out of it."""
    found = []
    layer = _layer(source.name)
    for target in source.imports:
        top = target.split(".")[0]
        if top == "tasks" or top in FRAMEWORKS:
            found.append(f"{source.name} imports {target}: the library knows neither tasks nor Lightning")
        elif top == "multimodal" and _layer(target) not in LAYERS[layer] | {layer}:
            found.append(f"{source.name} imports {target}: not a door of {layer}")
    return found


def task_violations(source: Source, folders: set[str]) -> list[str]:
    """A task imports no other task, the frame imports none, and only a task's own folder asks for its name."""
    parts = source.name.split(".")
    own = parts[1] if len(parts) > 1 and parts[1] in folders else None
    found = []
    for target in source.imports:
        target_parts = target.split(".")
        if target_parts[0] == "tasks" and len(target_parts) > 1 and target_parts[1] in folders - {own}:
            found.append(f"{source.name} imports {target}: only the registry finds tasks")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Compare) or "task" not in ast.unparse(node).lower():
            continue
        names = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)} & (folders - {own})
        if names:
            found.append(f"{source.name} line {node.lineno} compares a task with {sorted(names)}")
    return found


def front_end_violations(by_name: dict[str, Source], folders: set[str]) -> list[str]:
    """What the front end reaches at module level imports the standard library alone: help answers at once."""
    waiting = ["tasks.cli", "tasks.registry", *(f"tasks.{folder}" for folder in sorted(folders))]
    seen: set[str] = set()
    found = []
    while waiting:
        name = waiting.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        waiting.extend(".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1))
        for target in by_name[name].module_level:
            top = target.split(".")[0]
            if top in ("tasks", "multimodal"):
                waiting.extend(module for module in (target, target.rpartition(".")[0]) if module in by_name)
            elif top not in sys.stdlib_module_names:
                found.append(f"{name} imports {target} at module level: the front end is standard-library only")
    return found


def violations(root: Path) -> list[str]:
    every = sources(root)
    folders = _task_folders(root)
    found = front_end_violations({source.name: source for source in every}, folders)
    for source in every:
        if source.name.split(".")[0] == "multimodal":
            found += library_violations(source)
        found += task_violations(source, folders)
    return found


def test_the_arrows_hold() -> None:
    every = sources(ROOT)
    assert len(every) > 5, f"walked {ROOT} and found hardly any source"
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("multimodal/blocks/bad.py", "import pytorch_lightning as pl", "neither tasks nor Lightning"),
        ("multimodal/data/bad.py", "def f():\n    from lightning_fabric import seed", "neither tasks nor Lightning"),
        ("multimodal/models/bad.py", "from tasks.base import TaskModule", "neither tasks nor Lightning"),
        ("multimodal/models/bad.py", "from multimodal.pretrained import load", "not a door of multimodal.models"),
        ("multimodal/models/bad.py", "from ..data import image", "not a door of multimodal.models"),
        ("multimodal/models/bad.py", "from multimodal import data", "not a door of multimodal.models"),
        ("multimodal/attention/bad.py", "from multimodal.blocks.mlp import Mlp", "not a door of multimodal.attention"),
        ("multimodal/attention/kernels/bad.py", "from ..attention import Attention", "not a door of"),
        ("multimodal/data/bad.py", "import multimodal.models.vit", "not a door of multimodal.data"),
        ("multimodal/__init__.py", "from multimodal.pretrained import load", "not a door of multimodal"),
        ("tasks/one/bad.py", "from tasks.two.task import Two", "only the registry finds tasks"),
        ("tasks/one/bad.py", "from ..two import TASK", "only the registry finds tasks"),
        ("tasks/base.py", "def f():\n    import tasks.one.task", "only the registry finds tasks"),
        ("tasks/base.py", "def f(task):\n    if task == 'one':\n        return 1", "compares a task with ['one']"),
        ("tasks/two/bad.py", "def f(task):\n    return task.name in ('one',)", "compares a task with ['one']"),
        ("tasks/cli.py", "import torch", "standard-library only"),
        ("tasks/cli.py", "from tasks.helper import x", "standard-library only"),
        ("tasks/registry.py", "class A:\n    import numpy", "standard-library only"),
        ("tasks/one/__init__.py", "from tasks.one.task import One", "standard-library only"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, code: str, message: str) -> None:
    for folder in ("multimodal", "tasks", "tasks/one", "tasks/two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "tasks/helper.py").write_text("import yaml")
    (tmp_path / "tasks/one/task.py").write_text("import torch")
    (tmp_path / "tasks/cli.py").write_text("import tasks.registry\n\ndef main():\n    import torch")
    (tmp_path / "tasks/registry.py").write_text("import typing\nif typing.TYPE_CHECKING:\n    import torch")
    assert violations(tmp_path) == []
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(code)
    found = violations(tmp_path)
    assert found
    assert all(message in line for line in found), found


def test_the_front_end_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "pytorch_lightning", "jsonargparse", "yaml"]
    code = f"import sys, tasks.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_import_is_declared() -> None:
    """Each distribution that the packages import stands in pyproject.toml, in the core or in an extra for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *(line for name in extras if name != "dev" for line in extras[name])]
    declared = {_normal(re.split(r"[\[<>=!~; ]", line)[0]) for line in required}
    distributions = packages_distributions()
    for source in sources(ROOT):
        for target in source.imports:
            top = target.split(".")[0]
            if top in sys.stdlib_module_names or top in ("multimodal", "tasks"):
                continue
            providers = {_normal(name) for name in distributions.get(top, [top])}
            assert providers & declared, f"{source.name} imports {top}, which pyproject.toml does not declare"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
