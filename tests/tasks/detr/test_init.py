"""Starting from weights for other classes: what belongs to a class goes with its name."""

from typing import Any

import pytest
import torch

from multimodal.blocks import StackConfig
from multimodal.models.detr import DETR, DETRConfig
from multimodal.pretrained import Checkpoint
from tasks.detr.classes import State, matching
from tasks.detr.task import DETRModule

SIDE: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2}
TINY: dict[str, Any] = {
    "num_queries": 4,
    "backbone": "conv",
    "encoder": SIDE | {"final_norm": False},
    "decoder": SIDE,
}
HAD = ["N/A", "person", "cat", "N/A", "dog"]
BOXES: dict[str, Any] = {"queries": "boxes", "scores": "sigmoid"}
PROPOSED: dict[str, Any] = {"queries": "proposed", "scores": "sigmoid"}


def module(num_classes: int, **options: Any) -> DETRModule:
    return DETRModule(num_classes=num_classes, **_stacks(options))


def checkpoint(labels: list[str] | None = HAD, num_classes: int = 5, **options: Any) -> Checkpoint:
    torch.manual_seed(7)
    return Checkpoint.of("detr", DETR(DETRConfig(num_classes=num_classes, **_stacks(options))), labels=labels)


def _stacks(options: dict[str, Any]) -> dict[str, Any]:
    values = TINY | options
    return values | {side: StackConfig(**values[side]) for side in ("encoder", "decoder")}


def start(ours: DETRModule, source: Checkpoint, labels: list[str] | None) -> tuple[State, State]:
    """The fresh weights, and those after loading."""
    fresh = {name: value.clone() for name, value in ours.model.state_dict().items()}
    ours.load_pretrained(source, "here", labels)
    return fresh, ours.model.state_dict()


def test_classes_match_by_name() -> None:
    assert matching(["dog", "person"], HAD) == {0: 4, 1: 1}
    assert matching(["Dog", "dog", "CAT"], HAD) == {1: 4, 2: 2}  # the exact one first, and only one of the two
    assert matching(["N/A", "n/a", "cow"], HAD) == {}
    assert matching(["cat"], ["Cat", "CAT"]) == {}  # which of the two is not known
    assert matching(["cat"], ["Cat", "cat"]) == {0: 1}


def test_rows_of_the_head_go_with_their_class(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = module(3), checkpoint()
    fresh, state = start(ours, theirs, ["cow", "Dog", "person"])
    for name in ("class_head.weight", "class_head.bias"):
        old = theirs.state_dict[name]
        assert torch.equal(state[name], torch.stack([fresh[name][0], old[4], old[1], old[5]]))
    others = [name for name in state if not name.startswith("class_head.")]
    assert all(torch.equal(state[name], theirs.state_dict[name]) for name in others)
    assert "here: 2 of 3 classes are among its own; the others start anew" in caplog.text


@pytest.mark.parametrize("labels", [HAD, None])
@pytest.mark.parametrize("wanted", [HAD, None])
def test_the_same_classes_keep_all(
    labels: list[str] | None, wanted: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = checkpoint(labels)
    _, state = start(module(5), theirs, wanted)
    assert all(torch.equal(value, theirs.state_dict[name]) for name, value in state.items())
    assert "classes" not in caplog.text


def test_a_checkpoint_without_names_and_with_another_number_gets_a_new_head() -> None:
    theirs = checkpoint(None)
    fresh, state = start(module(3), theirs, ["cow", "dog", "person"])
    assert torch.equal(state["class_head.weight"][:3], fresh["class_head.weight"][:3])
    assert torch.equal(state["class_head.weight"][3], theirs.state_dict["class_head.weight"][5])


def test_sigmoid_scores_have_no_row_for_no_object() -> None:
    theirs = checkpoint(**BOXES, denoising=2)
    fresh, state = start(module(2, **BOXES, denoising=3), theirs, ["cow", "cat"])
    name = "class_head.weight"
    assert torch.equal(state[name], torch.stack([fresh[name][0], theirs.state_dict[name][2]]))
    name = "queries.labels.weight"
    old = theirs.state_dict[name]
    assert torch.equal(state[name], torch.stack([fresh[name][0], old[2]]))


def test_the_head_of_proposals_is_mapped_as_well() -> None:
    theirs = checkpoint(**PROPOSED)
    fresh, state = start(module(2, **PROPOSED), theirs, ["cow", "cat"])
    for name in ("queries.proposer.class_head.weight", "queries.proposer.class_head.bias"):
        assert torch.equal(state[name], torch.stack([fresh[name][0], theirs.state_dict[name][2]]))


@pytest.mark.parametrize(("had", "has"), [(0, 2), (2, 0)])
def test_denoising_may_begin_or_end(had: int, has: int) -> None:
    theirs = checkpoint(**BOXES, denoising=had)
    fresh, state = start(module(5, **BOXES, denoising=has), theirs, HAD)
    name = "queries.labels.weight"
    assert (name in state) == bool(has)
    assert not has or torch.equal(state[name], fresh[name])
    assert torch.equal(state["class_head.weight"], theirs.state_dict["class_head.weight"])


def test_other_scores_take_over_the_classes_alone() -> None:
    theirs = checkpoint()
    fresh, state = start(module(5, scores="sigmoid"), theirs, HAD)
    assert torch.equal(state["class_head.weight"], theirs.state_dict["class_head.weight"][:5])
    theirs = checkpoint(scores="sigmoid")
    fresh, state = start(module(5), theirs, HAD)
    assert torch.equal(state["class_head.weight"][:5], theirs.state_dict["class_head.weight"])
    assert torch.equal(state["class_head.weight"][5], fresh["class_head.weight"][5])


def test_what_does_not_fit_is_listed() -> None:
    labels = ["cow", "dog", "person"]
    with pytest.raises(ValueError, match=r"^here: .*mis-shaped queries\.embed\.weight \[4, 16\] \(expected \[6"):
        module(3, num_queries=6).load_pretrained(checkpoint(), "here", labels)
    with pytest.raises(ValueError, match=r"^here: .*missing decoder\.blocks\.1\."):
        module(3, decoder=SIDE | {"depth": 2}).load_pretrained(checkpoint(), "here", labels)
    wide = {side: TINY[side] | {"embed_dim": 32} for side in ("encoder", "decoder")}
    with pytest.raises(ValueError, match=r"class_head\.weight \[6, 16\] \(expected \[4, 32\]\)"):
        module(3, **wide).load_pretrained(checkpoint(), "here", labels)
    spoiled = checkpoint()
    spoiled.state_dict["class_head.bias"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"mis-shaped class_head\.bias \[2\] \(expected \[4\]\)$"):
        module(3).load_pretrained(spoiled, "here", labels)
