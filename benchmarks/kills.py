"""Kill a run at random moments of its first two epochs, go on, and compare with the run that was never stopped.

    python benchmarks/kills.py [--kills 20]

About seven minutes on two cores. Augmentation, stochastic depth, two loader workers, a moving average, accumulation and
a validation in the middle of the epoch are on. All processes of a run are killed (SIGKILL), the loader's workers too.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from report import origin, write_section

from multimodal.pretrained.files import read_torch
from tasks.run import read_metrics

FLAGS = [
    *("--trainer.max_epochs", "2", "--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "0.5"),
    *("--model.drop_path", "0.1", "--data.num_workers", "2", "--data.batch_size", "8", "--save_every_n_steps", "5"),
    *("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false"),
]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tasks.cli", "fit", "vit", *arguments]
    # One thread: how many there are decides how sums are rounded, and so the last bit.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=silent, stderr=silent, process_group=0)


def finish(*arguments: str) -> int:
    return start(*arguments).wait()


def trained_for(process: subprocess.Popen[bytes], root: Path, seconds: float) -> bool:
    """Wait until the run has trained so long; whether it still runs."""
    while not list(root.glob("vit/*/config.yaml")) and process.poll() is None:
        time.sleep(0.01)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    return process.poll() is None


def only_run(root: Path) -> Path:
    (run,) = (root / "vit").iterdir()
    return run


def equal(run: Path, whole: Path) -> bool:
    """The same raw and averaged weights, the same state of the optimizer, and the same logged values."""
    ours, theirs = (read_torch(folder / "checkpoints" / "last.ckpt") for folder in (run, whole))
    weights = all(
        torch.equal(ours[part][name], theirs[part][name])
        for part in ("state_dict", "current_model_state")
        for name in theirs[part]
    )
    optimizer = all(
        torch.equal(ours["optimizer_states"][0]["state"][key][name], value)
        for key, state in theirs["optimizer_states"][0]["state"].items()
        for name, value in state.items()
    )
    return weights and optimizer and read_metrics(run) == read_metrics(whole)


def kill_once(root: Path, whole: Path, seconds: float) -> str:
    process = start(*FLAGS, "--trainer.default_root_dir", str(root))
    if not trained_for(process, root, seconds):
        return "finished before the kill"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run = only_run(root)
    if not list((run / "checkpoints").glob("*.ckpt")):
        return "killed before the first save"
    if finish("--resume", str(run), "--trainer.enable_progress_bar", "false") != 0:
        return "damaged"
    return "bit-identical" if equal(run, whole) else "different"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    kills = parser.parse_args().kills
    heading = origin("pytorch-lightning")
    random.seed(0)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        process = start(*FLAGS, "--trainer.default_root_dir", f"{folder}/whole")
        trained_for(process, Path(folder, "whole"), 0)
        started = time.monotonic()
        assert process.wait() == 0
        length = time.monotonic() - started
        while sum(outcomes[end] for end in ("bit-identical", "different", "damaged")) < kills:
            root, moment = Path(folder, str(outcomes.total())), random.uniform(0, length)
            outcome = kill_once(root, only_run(Path(folder, "whole")), moment)
            outcomes[outcome] += 1
            print(f"killed after {moment:.1f} of {length:.1f} s of training: {outcome}", flush=True)
    rows = [f"| {outcome} | {count} |" for outcome, count in outcomes.most_common()]
    write_section("Exact resume after kills", [heading, "", "| end of a run | runs |", "|---|---|", *rows])


if __name__ == "__main__":
    main()
