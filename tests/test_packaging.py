"""What is built from the checkout holds what a stranger's installation needs."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_ships_code_and_recipes(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("multimodal", "tasks"):
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert sources <= names
        assert f"{folder}/py.typed" in names
    recipes = {f"tasks/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert recipes
    assert recipes <= names
    assert not [name for name in names if name.split("/")[0] in ("configs", "tests", "docs", "benchmarks")]


def test_the_source_distribution_can_be_tested(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt", "configs/vit.yaml", "tests/conftest.py"} <= names
