"""How a user's mistake is told: one line that names the nearest valid word. Standard library only."""

from collections.abc import Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """The command itself is wrong: told in one line, exit code 2."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the known words nearest to `word`, or all of them where they are few."""
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"expected one of: {', '.join(known)}" if len(known) <= 20 else "see --help"


def one_line(error: object) -> str:
    """A message that may span lines, as one."""
    return " ".join(str(error).split()) or type(error).__name__
