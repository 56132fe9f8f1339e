"""A process of a run with several. Standard library only: it is watched from its first moment on."""

import os
import sys
import threading
import time

POLL = 2.0
"""Seconds between two looks at the parent."""
GRACE = 5.0
"""Seconds in which a process may notice by itself, in what it exchanges with the others, that one of them is gone."""


def end_with_parent() -> None:
    """End this process soon after the one that started it for a share of a run, the first one or torchrun.

    Without it a process that has nothing to exchange for long, as in a validation, would go on alone until then.
    """
    if "LOCAL_RANK" in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    time.sleep(GRACE)
    print("multimodal: error: the process that started this one is gone", file=sys.stderr, flush=True)
    os._exit(1)
