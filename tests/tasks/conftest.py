"""A small run that tests read from, and the command line inside this process."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100

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


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both CIFARs in their own format, of a few random images, whose checksums torchvision expects."""
    root = tmp_path / "cifar"
    names10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    names100 = [f"kind_{number:02d}" for number in range(100)]
    for archive, names, key in ((CIFAR10, names10, "labels"), (CIFAR100, names100, "fine_labels")):
        folder = root / archive.base_folder
        folder.mkdir(parents=True)
        for part in ("train_list", "test_list"):
            files = []
            for name, _ in getattr(archive, part):
                seed = int.from_bytes(name.encode(), "little") % 2**32
                pixels = np.random.default_rng(seed).integers(0, 256, (200, 3072), np.uint8)
                files.append([name, _write(folder / name, {"data": pixels, key: [i % len(names) for i in range(200)]})])
            monkeypatch.setattr(archive, part, files)
        digest = _write(folder / archive.meta["filename"], {archive.meta["key"]: names})
        monkeypatch.setattr(archive, "meta", {**archive.meta, "md5": digest})
    return root


def _write(path: Path, content: object) -> str:
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()
