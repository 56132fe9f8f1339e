"""A small run that tests read from, and the command line inside this process."""

from pathlib import Path

import pytest

from tasks.cli import main
from tests.tasks.commands import SMALL, Result, Run


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command line: `run("fit", "vit", ...)`."""

    def command(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return command


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs on the digits, with a moving average. Not to be written into."""
    root = tmp_path_factory.mktemp("runs")
    assert main(["fit", "vit", *SMALL, "--trainer.max_epochs", "2", "--trainer.default_root_dir", str(root)]) == 0
    (folder,) = (root / "vit").iterdir()
    return folder
