"""Random numbers of a sample: a function of (seed, epoch, index) and of nothing else."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*key: int) -> int:
    """A seed for a generator, far from that of any neighbouring key."""
    # Digest rather than sum: keys such as (0, 1) and (1, 0) must not share their numbers.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Run the body under torch's CPU generator seeded by `key`, then put the generator back as it was.

    Augmentation drawn under `seeded(seed, epoch, index)` differs from epoch to epoch, does not depend on the number of
    workers or processes or on where training was resumed, and leaves the random numbers of the model (dropout) alone.
    """
    state = torch.get_rng_state()
    # The CPU generator alone: torch.manual_seed would seed accelerators too, which a worker process must not touch.
    torch.default_generator.manual_seed(seed_of(*key))
    try:
        yield
    finally:
        torch.set_rng_state(state)
