"""What every test stands on: the same random numbers, one thread a process, and the folder of real data."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

# pytest-xdist runs one process a core; more threads than that only take turns.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and reference outputs that lies beside the repository; a clone alone does not have it."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, which holds real data and reference outputs and is no part of the repository")
    return folder
