"""The parser behind fit, validate and test: a mistake is one line that names the nearest flag, key or value."""

import re
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace, set_parsing_settings
from pytorch_lightning.cli import LightningArgumentParser

from tasks.errors import UsageError, did_you_mean, one_line

set_parsing_settings(
    docstring_parse_attribute_docstrings=True,  # the sentences below a config's fields are the help of their flags
    # A config may name a callback, a logger and their like, and make nothing else run.
    instantiate_subclass_spec_in_any=False,
    import_path_denylist=[],  # none besides jsonargparse's own, which this enforces
)

_ELSEWHERE = {
    "--ckpt_path": "use --checkpoint with validate and test, --init or --resume with fit",
    "--checkpoint": "fit takes --init or --resume",
    **dict.fromkeys(("--init", "--freeze", "--resume"), "only fit takes it"),
}
_CLASSES = (*pl.callbacks.__all__, *pl.loggers.__all__, *pl.strategies.__all__, *pl.profilers.__all__)

# jsonargparse's messages, on one line.
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (?P<flag>[^\s=]+)")
_UNKNOWN_KEY = re.compile(r"(?:Group '(?P<group>[^']+)' does not accept option|Option) '(?P<key>[^']+)'")
_LINKED = re.compile(r"argument \S+ --> (?P<key>\S+):|Linked \"(?P<target>[^\"]+)\" must be given via")
_CLASS = re.compile(r".*?(?P<problem>Problem with given class_path .*?|Import path .*? subclass of \w+) - ")
_VALUE = re.compile(r"Parser key \"(?P<key>[^\"]+)\": (?P<reason>.*)")
_REASONS = (
    re.compile(r"Expected an? (?P<types>.+)\. Got value: (?P<value>.*)"),
    re.compile(r".*Subtypes: \[(?P<types>.*)\] Errors: .* Given value type: .* Given value: (?P<value>.*)"),
)


class TaskParser(LightningArgumentParser):
    """Lightning's parser, with errors for people."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.linked: set[str] = set()
        """Options that links set."""
        super().__init__(*args, **kwargs)

    def link_arguments(self, source: Any, target: str, *args: Any, **kwargs: Any) -> None:
        """Let one option follow from another, which is then no flag."""
        self.linked.add(target)
        super().link_arguments(source, target, *args, **kwargs)

    def parse_path(self, path: str | PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Parse a config file; its name begins the error."""
        try:
            self._check_file(Path(path))
            return super().parse_path(path, *args, **kwargs)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    def _check_file(self, path: Path) -> None:
        """Refuse what the parser would drop in silence, or tell of without the file's name."""
        try:
            groups = yaml.safe_load(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(f"no text in UTF-8 ({error}), expected YAML") from error
        except (OSError, yaml.YAMLError):
            return  # the parser tells
        if not isinstance(groups, dict):
            raise UsageError(f"holds {_in_words(groups)}, expected options by name")
        options = self.get_defaults(skip_validation=True)  # without those that links set
        for group, values in groups.items():
            if isinstance(options.get(str(group)), Namespace) and not isinstance(values, dict):
                raise UsageError(f"{group} is {_in_words(values)}, expected options by name")
            for key in [f"{group}.{name}" for name in values] if isinstance(values, dict) else [str(group)]:
                if key in self.linked:
                    raise UsageError(_no_flag(key))
                if key not in options:
                    raise UsageError(f"unknown key {key}: {did_you_mean(key, options.keys())}")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        if not self.exit_on_error:  # the parser of a class inside: its message becomes part of another one
            super().error(message, ex)
        raise UsageError(self._explain(one_line(message))) from ex

    def _explain(self, message: str) -> str:
        if found := _VALUE.fullmatch(message):
            return f"{found['key']}: {_explain_value(found['reason'])}"
        keys = [*self.get_defaults(skip_validation=True).keys(), "config", "print_config"]
        if found := _UNKNOWN_FLAG.search(message):
            flag = found["flag"]
            return f"unknown flag {flag}: {_ELSEWHERE.get(flag) or did_you_mean(flag, [f'--{key}' for key in keys])}"
        if found := _UNKNOWN_KEY.search(message):
            key = ".".join(filter(None, (found["group"], found["key"])))
            return f"unknown key {key}: {did_you_mean(key, keys)}"
        if found := _LINKED.search(message):
            return _no_flag(found["key"] or found["target"])
        return message


def _no_flag(key: str) -> str:
    return f"{key} is no flag, see 'Linked arguments' in --help for what sets it"


def _in_words(value: Any) -> str:
    return "nothing" if value is None else f"{str(value)!r:.60}"


def _explain_value(reason: str) -> str:
    if found := _CLASS.match(reason):
        return found["problem"]
    for pattern in _REASONS:
        if found := pattern.fullmatch(reason):
            value, types = found["value"], found["types"]
            words = re.findall(r"'([\w-]+)'", types) if "Literal" in types else []
            hint = did_you_mean(value, words or _CLASSES)
            return f"unknown value {value}: {hint if words or hint.startswith('did') else f'expected {_spell(types)}'}"
    return reason


def _spell(types: str) -> str:
    """Python's types as they are written in a config."""
    bare = re.sub(r"<class '([\w.]+)'>", r"\1", types)
    return re.sub(r"(?:\w+\.)+(?=\w)", "", bare).replace("NoneType", "null")
