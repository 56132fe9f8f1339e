"""What holds on a GPU: outputs equal those of the CPU, attention is fused, training runs, and how fast all of it is.

    benchmarks/gpu_check.sh [FOLDER] [--device cpu] [--quick]

For each task, with the model of its default recipe:

1. outputs in float32, bfloat16 and float16 beside those of the CPU in float32, by max|a - b| / max(1, max|b|);
2. which attention torch ran, forward and backward, by the names of its operators and of the device's kernels;
3. 50 training steps of `multimodal fit` on the embedded data with `bf16-mixed`, without and with compilation;

and then `multimodal benchmark --peers --size published`, for the time that is left. The exit code is 1 where anything
failed. A package that is missing, or too old, is told, and what needs it is skipped; so is what the time does not
suffice for.
"""

import argparse
import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SECONDS = 460
"""For everything."""
LONGEST = 150
"""For a run of `fit`."""
LATE = "skipped (time)"
TASKS = ("vit", "clip", "detr", "whisper", "dt")
PACKAGES = (
    *("pytorch_lightning", "jsonargparse", "torchvision", "torchaudio", "timm", "open_clip", "safetensors", "sklearn"),
    *("transformers", "whisper", "faster_whisper", "vit_pytorch", "x_transformers", "nanodt", "gymnasium", "soundfile"),
    *("faster_coco_eval", "scipy", "tokenizers", "jiwer", "matplotlib"),
)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Without TF32. bfloat16 has 8 bits of mantissa and float16 11; errors of a few layers add up to some units."""
FUSED = ("flash", "efficient", "cudnn", "fused_attention_overrideable")
"""Parts of the names of torch's fused operators."""
FEW = {
    "vit": [],
    "clip": ["--data.num_scenes", "640", "--data.batch_size", "32"],
    "detr": ["--data.num_scenes", "128", "--data.batch_size", "8"],
    "whisper": ["--data.num_messages", "800", "--data.num_workers", "0"],
    "dt": ["--data.num_episodes", "40", "--model.episodes", "1"],
}
"""So that the data take seconds."""


@dataclass
class Line:
    """One thing that was looked at."""

    part: str
    task: str
    what: str
    result: str
    """ok, failed, skipped, or skipped (time)."""
    told: str = ""


@dataclass
class Check:
    """All of it, on one device."""

    device: torch.device
    folder: Path
    quick: bool
    lines: list[Line] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return SECONDS - (time.monotonic() - self.start)

    def note(self, line: Line) -> None:
        self.lines.append(line)
        seconds = time.monotonic() - self.start
        print(f"{seconds:5.0f} s  {line.result:16}{line.part}, {line.task}, {line.what}  {line.told}", flush=True)

    def run(self, part: str, task: str, look: Callable[[str], Iterator[Line]]) -> None:
        """What can be looked at of a task; a package that is missing skips the rest, an error fails it."""
        try:
            for line in look(task):
                self.note(line)
        except ModuleNotFoundError as error:
            self.note(Line(part, task, "", "skipped", f"{error.name} is not installed"))
        except Exception as error:  # whatever it is, the other tasks are looked at
            traceback.print_exc()
            told = " ".join(str(error).split())[:200]
            self.note(Line(part, task, "", "failed", f"{type(error).__name__}: {told}"))

    # ------------------------------------------------------------------------------------------------------ parity

    def parity(self, task: str) -> Iterator[Line]:
        """Outputs of each dtype on the device beside the CPU's in float32."""
        model, inputs = example(task)
        expected = outputs(model, inputs)
        for dtype, tolerance in TOLERANCES.items():
            on_device = example(task)[0].to(self.device, dtype)
            found = outputs(on_device, {name: moved(value, self.device, dtype) for name, value in inputs.items()})
            errors = [difference(a, b) for a, b in zip(found, expected, strict=True)]
            result = "ok" if all(error <= tolerance for error in errors) else "failed"  # NaN is not
            told = ", ".join(f"{error:.1e}" for error in errors)
            yield Line("parity", task, name_of(dtype), result, f"{told}, at most {tolerance:.0e}")

    # ------------------------------------------------------------------------------------------------------- fused

    def fused(self, task: str) -> Iterator[Line]:
        """Which attention runs for evaluation, and on a GPU also with gradients."""
        gpu = self.device.type == "cuda"
        for dtype in (torch.bfloat16, torch.float16) if gpu else (torch.float32,):
            for trains in (False, True) if gpu else (False,):
                model, inputs = example(task)
                model = model.to(self.device, dtype).requires_grad_(trains)
                given = {name: moved(value, self.device, dtype) for name, value in inputs.items()}
                operators, kernels = attention_of(model, given, trains)
                plain = not any(part in name for name in operators for part in FUSED)
                what = f"{name_of(dtype)}, {'with' if trains else 'without'} gradients"
                told = ", ".join([*sorted(operators), *sorted(kernels)[:4]])
                yield Line("attention", task, what, "failed" if plain else "ok", told or "none of torch's own")

    # ---------------------------------------------------------------------------------------------------- training

    def training(self, task: str, compiled: bool) -> Iterator[Line]:
        """`multimodal fit` for 50 steps."""
        for package in ("pytorch_lightning", "jsonargparse"):
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(f"no {package}", name=package)
        steps = 10 if self.quick else 50
        folder = self.folder / "runs" / f"{task}{'-compiled' * compiled}"
        command = [sys.executable, "-m", "tasks.cli", "fit", task, *FEW[task], "--trainer.max_steps", str(steps)]
        command += ["--trainer.max_epochs", "1000", "--trainer.precision", "bf16-mixed", "--trainer.devices", "1"]
        command += ["--trainer.accelerator", "gpu" if self.device.type == "cuda" else "cpu"]
        command += ["--trainer.log_every_n_steps", "5", "--trainer.limit_val_batches", "1"]
        command += ["--trainer.val_check_interval", "1.0", "--trainer.enable_progress_bar", "false"]
        command += ["--model.depth", "1"] if self.quick and compiled else []  # compiling takes minutes on a CPU
        command += ["--model.compile", str(compiled).lower(), "--trainer.default_root_dir", str(folder)]
        start = time.monotonic()
        what = f"{steps} steps, bf16-mixed{', compiled' * compiled}"
        longest = min(LONGEST, self.left - 60)
        if longest <= 0:
            yield Line("training", task, what, LATE, "not begun")
            return
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=longest)
        except subprocess.TimeoutExpired:
            yield Line("training", task, what, LATE, f"not done after {longest:.0f} s")
            return
        seconds = time.monotonic() - start
        if done.returncode:
            yield Line("training", task, what, "failed", (done.stderr.strip().splitlines() or ["?"])[-1])
            return
        losses = training_losses(folder)
        finite = losses and all(abs(loss) < float("inf") for loss in losses)
        told = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {seconds:.0f} s with start" if finite else f"losses {losses}"
        yield Line("training", task, what, "ok" if finite else "failed", told)

    def trainings(self) -> None:
        """Several at a time: what takes long is their start."""
        jobs = [(task, compiled) for compiled in (False, True) for task in TASKS]
        if self.quick:
            jobs = [(task, compiled) for task, compiled in jobs if not compiled or task == "vit"]
        workers = max(1, min(5, (os.cpu_count() or 1) // 3))
        with ThreadPoolExecutor(workers) as pool:
            for task, compiled in jobs:
                pool.submit(self.run, "training", task, lambda task, compiled=compiled: self.training(task, compiled))

    # --------------------------------------------------------------------------------------------------- benchmark

    def benchmark(self) -> None:
        """`multimodal benchmark`; where time runs out it is interrupted, and writes what it has."""
        command = [sys.executable, "-m", "tasks.cli", "benchmark", "--device", str(self.device), "--peers"]
        command += ["dt", "--size", "tiny", "--rounds", "2"] if self.quick else ["--size", "published", "--rounds", "5"]
        command += ["--json", str(self.folder / "benchmark.json"), "--html", str(self.folder / "benchmark.html")]
        late = False
        with (self.folder / "benchmark.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = process.wait(max(30.0, self.left - 30))
            except subprocess.TimeoutExpired:
                late = True
                process.send_signal(signal.SIGINT)
                code = ended(process, 60)
        rows, broken = measured(self.folder / "benchmark.json")
        result = "failed" if broken or not (late or code == 0) else LATE if late else "ok"
        told = f"{rows} rows, {broken} with errors, exit code {code}; see benchmark.log"
        self.note(Line("benchmark", "all", "with peers", result, told))


def ended(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """The exit code of a process that has been told to stop; one that takes longer is killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def measured(file: Path) -> tuple[int, int]:
    """How many rows a benchmark has written, and in how many of them something failed."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return len(rows), sum(any(one["error"] for one in (row, *row["entries"])) for row in rows)


def example(task: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of the default recipe, on CPU in float32, and random inputs: the same at each call."""
    from multimodal.models import model_classes
    from tasks import registry

    record = registry.get(task)
    config = record.load(str(record.benchmark))("tiny")[0].config
    if task == "detr":  # which queries are proposed depends on the last bit
        config = replace(config, queries="learned", modulated=False, denoising=0)
    torch.manual_seed(0)
    model = model_classes(task)[0](config).eval()
    return model, dict(record.load(record.example)(config, 2).inputs)


def moved(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """What a model answers, in float32 on the CPU."""
    with torch.inference_mode():
        found: Any = model(*inputs.values())
    parts = [found] if isinstance(found, Tensor) else found
    return [part.float().cpu() for part in parts if isinstance(part, Tensor)]


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / max(1.0, float(b.abs().max())))


def attention_of(model: nn.Module, inputs: dict[str, Tensor], trains: bool) -> tuple[set[str], set[str]]:
    """The names of torch's operators for attention that a model runs, and of the device's kernels that say so."""
    from torch.profiler import ProfilerActivity, profile

    gpu = next(model.parameters()).is_cuda
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        with torch.set_grad_enabled(trains):
            found: Any = model(*inputs.values())
            if trains:
                parts = [found] if isinstance(found, Tensor) else found
                sum(part.float().square().sum() for part in parts if isinstance(part, Tensor)).backward()  # type: ignore[union-attr]
        if gpu:
            torch.cuda.synchronize()
    names = {event.key for event in profiler.key_averages()}
    operators = {name for name in names if name.startswith("aten::") and "attention" in name}
    kernels = {name[:60] for name in names if not name.startswith("aten::")}
    return operators, {name for name in kernels if any(part in name.lower() for part in ("flash", "fmha", "attention"))}


def training_losses(folder: Path) -> list[float]:
    """Of single steps, every fifth, in a run's metrics.csv."""
    losses = []
    for file in folder.rglob("metrics.csv"):
        with file.open(newline="") as rows:
            losses += [float(row["train/loss_step"]) for row in csv.DictReader(rows) if row.get("train/loss_step")]
    return losses


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def header(check: Check) -> list[str]:
    """The machine, and what is not there."""
    gpu = torch.cuda.get_device_name(check.device) if check.device.type == "cuda" else "CPU"
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    return [
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, {gpu}, {os.cpu_count()} CPU cores",
        f"not installed, so what needs it is skipped: {', '.join(missing) or 'nothing'}",
    ]


def write(check: Check, told: list[str]) -> None:
    rows = ["| part | task | what | result | |", "|---|---|---|---|---|"]
    rows += [f"| {one.part} | {one.task} | {one.what} | {one.result} | {one.told} |" for one in check.lines]
    (check.folder / "report.md").write_text("\n".join(["# GPU check", "", *told, "", *rows, ""]))
    content = {"machine": told, "lines": [asdict(one) for one in check.lines]}
    (check.folder / "check.json").write_text(json.dumps(content, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(os.environ.get("OUT", "gpu_check")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer steps, and one task's benchmark: a rehearsal")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu --quick is the rehearsal")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a job in the background hands on that it ignores it
    torch.backends.cudnn.allow_tf32 = False  # parity in float32 is meant
    args.folder.mkdir(parents=True, exist_ok=True)
    check = Check(torch.device(args.device), args.folder.resolve(), args.quick)
    told = header(check)
    print(*told, sep="\n", flush=True)
    for task in TASKS:
        check.run("parity", task, check.parity)
        check.run("attention", task, check.fused)
    check.trainings()
    check.benchmark()
    write(check, told)
    failed = [one for one in check.lines if one.result == "failed"]
    late = sum(one.result == LATE for one in check.lines)
    print(f"{len(check.lines)} looked at, {len(failed)} failed, {late} not done in time; {check.folder / 'report.md'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
