"""What people read on the terminal."""

import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any

from tasks.errors import one_line

_PLAIN = warnings.formatwarning
# Advertisements, and remarks on what is meant to be so.
_MESSAGES = (
    "💡",
    "TPU available",
    "Loading `train_dataloader`",
    "Loaded model weights from the checkpoint",
    "`weights_only` was not set",
)
_LOST = re.compile(r"Child process with PID \d+ terminated with code (?P<code>-?\d+)")
_WARNINGS = (
    ".*Experiment logs directory .* exists and is not empty",  # it holds config.yaml
    ".*Checkpoint directory .* exists and is not empty",  # a resumed run's
    ".*WeightAveraging doesn't support sharding model layers",  # nor is it ever used with them
    ".*Please add the following callbacks: \\['EMA'\\]",  # said better by TaskModule
    ".*isinstance.treespec, LeafSpec.* is deprecated",  # inside Lightning
)


def quiet_lightning() -> None:
    """Leave out what Lightning says on every run and no one can act upon."""
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _one_line_warning
    for name in ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.trainer.connectors.checkpoint_connector"):
        logging.getLogger(name).addFilter(_wanted)
    logging.getLogger("lightning_fabric.strategies.launchers.subprocess_script").addFilter(_as_error)


def _wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_MESSAGES)


def _as_error(record: logging.LogRecord) -> bool:
    """Lightning's last words, before it ends all processes of a run that has lost one, as an error of this command."""
    if found := _LOST.search(record.getMessage()):
        record.msg, record.args = f"multimodal: error: a process of this run ended with code {found['code']}", ()
    return True


def _one_line_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What is said to users without the line of code that says it; other warnings as Python writes them."""
    if issubclass(category, UserWarning):
        return f"multimodal: warning: {one_line(message)}\n"
    return _PLAIN(message, category, filename, lineno, line)


def table(rows: Mapping[str, Any]) -> str:
    """Names and values, one a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {_shown(value)}" for name, value in rows.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "n/a" if value is None else str(value)
