"""fit, validate and test: LightningCLI for one task, whose module and data classes are fixed."""

import glob
import json
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Checkpoint as CheckpointCallback
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI
from pytorch_lightning.utilities import rank_zero_warn
from pytorch_lightning.utilities.exceptions import SIGTERMException

from multimodal import pretrained
from multimodal.pretrained import build_config, load_weights
from multimodal.pretrained.checkpoint import best_checkpoint
from multimodal.pretrained.files import read_torch
from multimodal.pretrained.record import structure
from tasks.checkpoints import BestCheckpoint, LastCheckpoint, WholeFitLoop
from tasks.console import quiet_lightning, table
from tasks.curves import draw_curves
from tasks.errors import UsageError, one_line
from tasks.optim import freeze
from tasks.parser import TaskParser
from tasks.registry import Task
from tasks.run import (
    CONFIG,
    LOCK,
    BeginRun,
    create_run,
    cut_rows,
    find_run,
    is_first_process,
    lock_run,
    loggers,
    read_config,
    resume_point,
    run_to_resume,
    write_summary,
)
from tasks.sharding import choose_strategy


def run(verb: str, task: Task, arguments: list[str]) -> int:
    """Run `multimodal VERB TASK ...`; the exit code."""
    quiet_lightning()
    told: type[ValueError] = UsageError
    cli: TaskCLI | None = None
    with ExitStack() as held:
        try:
            cli = TaskCLI(verb, task, arguments, held)
            told = ValueError
            cli.fit() if verb == "fit" else cli.evaluate()
        except Exception as error:
            if line := _explain(error):
                raise told(line + (cli.last_good() if cli else "")) from error
            raise
    return 0


def _explain(error: Exception) -> str | None:
    """What a user can act upon, in one line; None for a bug, which keeps its traceback."""
    line = one_line(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in line:
        return f"out of memory, a smaller model or data.batch_size is needed: {line}"
    if isinstance(error, RuntimeError) and ("closed by peer" in line or "reset by peer" in line):
        return "another process of this run is gone: it has told why, or was killed"
    if lacking := re.search(r"Requirement '([^']+)' not met", line):  # a logger's package
        return f"{lacking[1]} is not installed: pip install '{lacking[1]}'"
    expected = isinstance(error, ValueError | OSError | ModuleNotFoundError | MisconfigurationException)
    return line if expected or _raised_by_lightning(error) else None


def _raised_by_lightning(error: Exception) -> bool:
    """Whether Lightning's own code raised it, as it does, with any class of error, about flags and callbacks."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].split(".")[0] in ("pytorch_lightning", "lightning_fabric")


class TaskCLI(LightningCLI):
    """One task and one verb: parses, builds, and runs when asked to.

    Values come, the later ones winning, from the task's recipe, from the run or checkpoint that the command starts
    from, from --config files and from flags.
    """

    def __init__(self, verb: str, task: Task, arguments: Sequence[str], held: ExitStack) -> None:
        self.verb = verb
        self.task = task
        self.held = held
        """What is to be given back at the end."""
        self.source = ""
        self.checkpoint: pretrained.Checkpoint | None = None
        self.run_folder: Path | None = None
        self.resume_from: Path | None = None
        self.resumed_step: int | None = None
        self.resumed_rows: int | None = None
        self.begin_run: BeginRun | None = None
        self.last_checkpoint = LastCheckpoint(None, None, None)
        program = f"multimodal {verb} {task.name}"
        super().__init__(
            task.load(task.module),
            task.load(task.data),
            save_config_callback=None,
            # Samplers deal samples to processes themselves: each comes once, where Lightning's repeat some.
            trainer_defaults={"default_root_dir": "runs", "use_distributed_sampler": False},
            seed_everything_default=0,
            parser_class=TaskParser,
            parser_kwargs={
                "prog": program,
                "usage": f"{program} [--config FILE] [flags]",
                "description": task.help,
                "default_config_files": [glob.escape(str(task.config_path))],
                "allow_abbrev": False,
            },
            args=list(arguments),
            run=False,
            auto_configure_optimizers=False,
        )

    # Parsing

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for link in self.task.links:
            parser.link_arguments(link.source, link.target, apply_on=link.on)
        if self.verb != "fit":
            parser.add_argument("--checkpoint", type=str, required=True, help=f"What to measure: {pretrained.FORMATS}.")
            return
        parser.add_argument(
            "--init", type=str | None, default=None, help=f"Weights to start from: {pretrained.FORMATS}."
        )
        parser.add_argument(
            "--freeze",
            type=list[str] | str | None,
            default=None,
            help="Parameters of the model to leave as they are: a pattern such as 'encoder.*', or a list of patterns.",
        )
        parser.add_argument(
            "--resume", type=str | None, default=None, help="A run, or a checkpoint in one, to go on with."
        )
        parser.add_argument(
            "--save_every_n_steps",
            type=PositiveInt | None,
            default=None,
            help="Optimizer steps from one save of last.ckpt to the next, besides that after each epoch; null = none.",
        )
        parser.add_argument(
            "--save_every_n_minutes",
            type=PositiveFloat | None,
            default=10.0,
            help="Minutes from one save of last.ckpt to the next, besides that after each epoch; null = none.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse twice: once to see what the command starts from, then with the values of that beneath the user's."""
        assert isinstance(args, list)
        given = parser.parse_args([argument for argument in args if not argument.startswith("--print_config")])
        self.config = parser.parse_args([*self._base(given), *args])

    def _base(self, given: Namespace) -> list[str]:
        """Arguments that stand for the run or the checkpoint that the command starts from."""
        sources = {name: value for name in ("init", "resume", "checkpoint") if (value := given.get(name)) is not None}
        if not sources:
            return []
        if len(sources) > 1:
            raise ValueError("--resume and --init: expected one of them, since a run that goes on has its weights")
        if "" in sources.values():
            raise ValueError(f"--{next(iter(sources))} is empty, expected {pretrained.FORMATS}")
        if "resume" in sources:
            self.run_folder = self._lock(run_to_resume(sources["resume"]))  # before the checkpoint is looked at
            self.resume_from = resume_point(self.run_folder, sources["resume"])
        self.source = str(self.resume_from or next(iter(sources.values())))
        starts_anew = self.verb == "fit" and self.resume_from is None
        self.checkpoint = pretrained.read(self.source, task=self.task.name)
        base = ["--config", str(self.run_folder / CONFIG)] if self.run_folder else []
        return [*base, "--config", json.dumps(self._config_of(self.checkpoint, starts_anew=starts_anew))]

    def _config_of(self, checkpoint: pretrained.Checkpoint, *, starts_anew: bool) -> dict[str, Any]:
        """What a checkpoint decides: model, preprocessing, tokenizer and, unless training starts anew, the classes."""
        run_folder = find_run(self.source) if self.verb != "fit" else None
        data = dict(read_config(run_folder).get("data") or {}) if run_folder else {}
        data |= checkpoint.preprocess or {}
        if not starts_anew:
            data["labels"] = checkpoint.labels
        if checkpoint.tokenizer is not None:  # by its place: a config of 50,000 tokens would be no config
            data["tokenizer"] = self.source
        options = self.parser.get_defaults(skip_validation=True)  # without those that links set
        decided: dict[str, dict[str, Any]] = {
            group: {name: value for name, value in values.items() if f"{group}.{name}" in options}
            for group, values in (("model", checkpoint.config), ("data", data))
        }
        if self.verb != "fit":  # measured as it was trained, or exactly
            trainer = (read_config(run_folder).get("trainer") or {}) if run_folder else {}
            decided["trainer"] = {"precision": trainer.get("precision") or "32-true"}
        return decided

    # Building

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        self._load_weights()
        options = self.config_init["trainer"]
        averaged = self.model.hparams["ema_decay"] if self.verb == "fit" else None
        kwargs["strategy"] = choose_strategy(options["strategy"], averaged)
        callbacks = options["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if self.verb != "fit":
            saves = any(isinstance(callback, CheckpointCallback) for callback in callbacks)
            return super().instantiate_trainer(logger=options["logger"] or False, enable_checkpointing=saves, **kwargs)
        if options["fast_dev_run"] or options["barebones"]:  # nothing is to be written
            if self.resume_from is not None:
                raise ValueError("--resume and a trial (fast_dev_run, barebones): expected one of them")
            return super().instantiate_trainer(**kwargs)
        if any(isinstance(callback, ModelCheckpoint) and callback.save_last for callback in callbacks):
            raise ValueError("trainer.callbacks: save_last of a ModelCheckpoint would replace the run's own last.ckpt")
        folder = self._own_folder(Path(options["default_root_dir"]))
        saves = options["enable_checkpointing"] is not False
        if saves:
            callbacks = [*callbacks, BestCheckpoint(folder, f"val/{self.task.metric}", self.task.mode)]
        intervals = self.config.save_every_n_steps, self.config.save_every_n_minutes
        self.last_checkpoint = LastCheckpoint(folder if saves else None, *intervals)
        self.begin_run = BeginRun(folder, self._config_text(), self.resumed_rows)
        kwargs["callbacks"] = [*callbacks, self.begin_run, self.last_checkpoint]
        kwargs["logger"] = loggers(folder, options["logger"])
        try:
            trainer = super().instantiate_trainer(default_root_dir=folder, **kwargs)
        except BaseException:
            with suppress(OSError):  # a folder that is not empty stays
                (folder / LOCK).unlink()
                folder.rmdir()
            raise
        WholeFitLoop.install(trainer)
        return trainer

    def _own_folder(self, root: Path) -> Path:
        """The run's folder: that of the run to go on with, else a new one."""
        if self.run_folder is None:
            self.run_folder = self._lock(create_run(root, self.task.name))
        elif root != Path((read_config(self.run_folder).get("trainer") or {}).get("default_root_dir", root)):
            raise ValueError(f"trainer.default_root_dir is {root}, but a run goes on where it is: {self.run_folder}")
        return self.run_folder

    def _lock(self, run: Path) -> Path:
        if is_first_process():
            self.held.enter_context(lock_run(run))
        return run

    def _load_weights(self) -> None:
        """Start from the checkpoint; said here, before a run folder is made, if something does not fit."""
        if self.resume_from is not None and self.checkpoint is not None:
            self._check_model(self.checkpoint)
            load_weights(self.model.model, self.checkpoint.state_dict, self.source)  # Lightning will load them again
        elif self.checkpoint is not None:
            labels = getattr(self.datamodule, "labels", None) if self.verb == "fit" else None
            self.model.load_pretrained(self.checkpoint, self.source, labels)
        if self.verb == "fit" and self.config.freeze:
            if self.checkpoint is None:
                raise ValueError("--freeze needs --init: without it random weights would be frozen")
            freeze(self.model.model, self.config.freeze)
        if self.verb == "fit":
            sizes = [len(group["params"]) for group in self.model.optimizer_groups()]
            if self.resume_from is not None:
                self._check_optimizer(self.resume_from, sizes)

    def _check_model(self, checkpoint: pretrained.Checkpoint) -> None:
        """ValueError where flags make another model of a run's, also one with the same weights."""
        before = structure(build_config(self.task.name, checkpoint.config, self.source))
        for name, now in structure(self.model.model.config).items():
            if before[name] != now:
                raise ValueError(
                    f"{self.source}: its model has {name} {before[name]}, expected {now}; a run keeps its model, to "
                    "change it start with --init"
                )

    def _check_optimizer(self, checkpoint: Path, sizes: list[int]) -> None:
        saved = read_torch(checkpoint)
        if not saved.get("optimizer_states"):
            raise ValueError(f"{checkpoint}: weights alone, expected the state of a training too; start with --init")
        had = [len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"]]
        if had != sizes:
            raise ValueError(
                f"{checkpoint}: its optimizer has groups of {had} parameters, expected {sizes}; --freeze, "
                "model.layer_decay and other factors on model.lr stay as they are in a run, to change them start with "
                "--init"
            )
        self.resumed_step, self.resumed_rows = saved["global_step"], saved.get("rows")

    def _config_text(self) -> str:
        config = self.config.clone()
        config.resume = None
        text: str = self.parser.dump(config, skip_unset=False)
        return text

    # Running

    def fit(self) -> None:
        """Train, then test the best checkpoint and write down how it went."""
        with self._stoppable():
            self.trainer.fit(self.model, self.datamodule, ckpt_path=self.resume_from, weights_only=True)
        seconds = self.last_checkpoint.seconds
        if self.run_folder and self.begin_run and not self.begin_run.done:
            if self.trainer.is_global_zero:
                cut_rows(self.run_folder, self.resumed_rows)
            rank_zero_warn(
                f"{self.run_folder} had all its {self.resumed_step} steps behind it; more of trainer.max_epochs, "
                "trainer.max_steps or trainer.max_time makes it longer"
            )
        # A process that did not make the folder hears its name from the one that did.
        folder = self.trainer.strategy.broadcast(self.run_folder)
        # What was trained without checkpoints is tested as it is.
        best = best_checkpoint(folder) if folder and self.last_checkpoint.path else None
        # Loaded by the strategy, which knows how the weights lie.
        results = self._measure("test", best)
        if not self.trainer.is_global_zero:
            return
        value = results.get(f"test/{self.task.metric}")
        summary = {
            "task": self.task.name,
            "metric": self.task.metric,
            "value": None if value is None else round(value, 6),
            "params": sum(parameter.numel() for parameter in self.model.model.parameters()),
            "seconds": round(seconds, 1),
            "precision": self.trainer.precision,
            "checkpoint": str(best) if best else None,
        }
        if folder:
            write_summary(folder, summary)
            draw_curves(folder)
        print(table(summary))

    def last_good(self) -> str:
        """What is left of a training that an error has ended, as the end of its message."""
        path = self.last_checkpoint.path
        if path is None or not self.trainer.interrupted or not is_first_process():
            return ""
        return f"; the last good checkpoint is {path}" if path.is_file() else "; no checkpoint has been saved yet"

    def evaluate(self) -> None:
        """Measure the checkpoint."""
        results: dict[str, float | None] = {**self._measure(self.verb)}
        if self.trainer.is_global_zero:
            split = "val" if self.verb == "validate" else "test"
            results.setdefault(f"{split}/{self.task.metric}", None)  # absent where there is nothing to measure it by
            print(table(results))

    def _measure(self, verb: str, checkpoint: Path | None = None) -> dict[str, float]:
        measure = getattr(self.trainer, verb)
        with self._stoppable():
            results = measure(
                self.model, datamodule=self.datamodule, ckpt_path=checkpoint, weights_only=True, verbose=False
            )
        return dict(results[0]) if results else {}

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Exit codes of a stopped run: 130 after Ctrl-C, 143 after SIGTERM, where Lightning says 1 and 0."""
        try:
            yield
            if self.last_checkpoint.signal:  # it came after the last batch
                raise SIGTERMException
        except SystemExit as stop:
            if not self.trainer.interrupted and not self.last_checkpoint.signal:
                raise
            if self.run_folder and best_checkpoint(self.run_folder) and self.trainer.is_global_zero:
                print(f"go on with: multimodal fit {self.task.name} --resume {self.run_folder}", file=sys.stderr)
            number = signal.SIGTERM if isinstance(stop, SIGTERMException) else signal.SIGINT
            raise SystemExit(128 + (self.last_checkpoint.signal or number)) from stop
