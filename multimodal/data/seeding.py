"""Random numbers as a function of a key, and of nothing that happened before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Run the body under torch's CPU generator seeded by `key`, then put the generator back as it was.

    Augmentation drawn under `seeded(seed, epoch, index)` differs from epoch to epoch, does not depend on the number of
    workers or processes or on where training was resumed, and leaves the random numbers of the model (dropout) alone.
    """
    state = torch.get_rng_state()
    # The CPU generator alone: torch.manual_seed would seed accelerators too, which a worker process must not touch.
    torch.default_generator.manual_seed(_digest(key))
    try:
        yield
    finally:
        torch.set_rng_state(state)


def seed_all(*key: int) -> None:
    """Seed every generator of this process by `key`: Python's, NumPy's, and torch's on the CPU and its accelerator.

    Called before each training step with (seed, rank, step), it makes dropout the same in a run that was interrupted,
    and different on each rank.
    """
    seed = _digest(key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which asks for every kind of device and takes a hundred times as long.
    torch.default_generator.manual_seed(seed)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)


def _digest(key: tuple[int, ...]) -> int:
    """A digest rather than a sum: neighbouring keys such as (0, 1) and (1, 0) must not share their numbers."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
