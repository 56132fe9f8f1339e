"""Weights for some classes as a start for others: what belongs to a class goes with its name."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

State = dict[str, Tensor]

HEADS = tuple(f"{head}.{kind}" for head in ("class_head", "queries.proposer.class_head") for kind in ("weight", "bias"))
"""Rows of the class heads: that of the decoder, and that by which the encoder's tokens propose queries."""
NOISED = "queries.labels.weight"
"""A vector for each class of a noised box."""


def matching(wanted: Sequence[str], had: Sequence[str]) -> dict[int, int]:
    """Which of the wanted classes is which of those that there are, by index.

    Names count as the same where they are, or else where they differ in upper and lower case alone; a name that comes
    twice, such as COCO's "N/A", is none.
    """
    found: dict[int, int] = {}
    for spell in (str, str.casefold):
        names, others = [spell(name) for name in wanted], [spell(name) for name in had]
        once = {name for name, count in Counter(others).items() if count == 1}
        once &= {name for name, count in Counter(names).items() if count == 1}
        for index, name in enumerate(names):
            if name in once:
                found.setdefault(index, others.index(name))
    return found


def map_classes(state: State, fresh: State, classes: dict[int, int], *, no_object: bool) -> State:
    """A checkpoint's weights for other classes.

    Args:
        state: the weights.
        fresh: those of a new model, which classes keep that the checkpoint lacks.
        classes: of the new model's classes, by index, which they are in the checkpoint.
        no_object: the last row of both class heads is "no object".
    """
    mapped = {name: value for name, value in state.items() if name != NOISED}
    if NOISED in fresh:  # denoising may begin or end with a new training
        mapped[NOISED] = fresh[NOISED]
    for name in (*HEADS, NOISED):
        old, rows = state.get(name), fresh.get(name)
        if old is None or rows is None or old.dim() != rows.dim() or old.shape[1:] != rows.shape[1:]:
            continue  # loading says what does not fit
        if max(classes.values(), default=0) >= len(old):
            continue
        rows = rows.clone()
        rows[list(classes)] = old[list(classes.values())].to(rows)
        if no_object and name in HEADS:
            rows[-1] = old[-1]
        mapped[name] = rows
    return mapped
