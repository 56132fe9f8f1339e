"""The key machine: both directions to the bit, and every fault of keys and tables told."""

import pytest
import torch
from torch import Tensor, nn

from multimodal.attention import Attention
from multimodal.pretrained.keymap import Join, KeyMap, Reshape, Rule, Split, Transpose, check_keys


def state(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name.replace("__", "."): torch.randn(shape) for name, shape in shapes.items()}


QKV = tuple(f"*.{x}_proj.*" for x in "qkv")
CASES = {
    "rename": (
        [Rule("h.*.ln_1.*", "blocks.*.norm.*")],
        state(blocks__0__norm__weight=(4,), blocks__10__norm__bias=(4,)),
    ),
    "fused projection": (
        [Rule("*.in_proj_weight", tuple(f"*.{x}_proj.weight" for x in "qkv"), (Split(3),))],
        state(a__q_proj__weight=(4, 4), a__k_proj__weight=(4, 4), a__v_proj__weight=(4, 4)),
    ),
    "grouped heads": (
        [Rule("*.qkv.*", QKV, (Split((8, 4, 4)),))],
        state(a__q_proj__weight=(8, 6), a__k_proj__weight=(4, 6), a__v_proj__weight=(4, 6), a__q_proj__bias=(8,),
              a__k_proj__bias=(4,), a__v_proj__bias=(4,)),
    ),
    "GPT-2": (
        [Rule("h.*.c_attn.*", QKV, (Transpose(), Split(3))), Rule("h.*.c_proj.*", "*.out_proj.*", (Transpose(),))],
        state(x__q_proj__weight=(6, 4), x__k_proj__weight=(6, 4), x__v_proj__weight=(6, 4), x__q_proj__bias=(6,),
              x__k_proj__bias=(6,), x__v_proj__bias=(6,), x__out_proj__weight=(4, 6), x__out_proj__bias=(4,)),
    ),
    "tokens": (
        [Rule(("cls", "reg"), "prefix", (Join((1, 3), dim=1), Reshape((1, -1, 4), (-1, 4))))],
        state(prefix=(4, 4)),
    ),
    "one token": ([Rule("cls", "prefix", (Reshape((1, 1, 4), (-1, 4)),))], state(prefix=(1, 4))),
    "convolution": ([Rule("conv", "proj", (Reshape((5, 3, 2, 2), (5, -1)),))], state(proj=(5, 12))),
    "absent bias": (
        [Rule(f"self.{name}.*", f"attn.{x}_proj.*") for name, x in (("query", "q"), ("key", "k"), ("value", "v"))],
        state(attn__q_proj__weight=(4, 4), attn__q_proj__bias=(4,), attn__k_proj__weight=(4, 4),
              attn__v_proj__weight=(4, 4), attn__v_proj__bias=(4,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_to_the_bit(name: str) -> None:
    rules, ours = CASES[name]
    names = KeyMap(rules, {key: tensor.to("meta") for key, tensor in ours.items()})
    theirs = names.to_theirs(ours, "export")
    assert {key: tensor.shape for key, tensor in theirs.items()} == {k: t.shape for k, t in names.theirs.items()}
    back = names.to_ours(theirs, "import")
    assert list(back) == list(ours)
    assert all(torch.equal(back[key], tensor) for key, tensor in ours.items())
    again = names.to_theirs(back, "export")
    assert all(torch.equal(again[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    rules, ours = CASES["GPT-2"]
    ours = {key: tensor.to(dtype) for key, tensor in ours.items()}
    names = KeyMap(rules, ours)
    back = names.to_ours(names.to_theirs(ours, ""), "")
    assert all(torch.equal(back[key], tensor) and back[key].dtype == dtype for key, tensor in ours.items())


def test_multihead_attention_gives_the_same_output() -> None:
    theirs, ours = nn.MultiheadAttention(8, 2, batch_first=True), Attention(8, 2)
    rules = [
        Rule("in_proj_weight", tuple(f"{x}_proj.weight" for x in "qkv"), (Split(3),)),
        Rule("in_proj_bias", tuple(f"{x}_proj.bias" for x in "qkv"), (Split(3),)),
        Rule("out_proj.*", "out_proj.*"),
    ]
    ours.load_state_dict(KeyMap(rules, ours.state_dict()).to_ours(theirs.state_dict(), ""))
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x)[0], theirs(x, x, x)[0])


def test_nothing_is_shared_with_the_source() -> None:
    rules, ours = CASES["grouped heads"]
    names = KeyMap(rules, ours)
    theirs = names.to_theirs(ours, "")
    back = names.to_ours(theirs, "")
    before = {key: tensor.clone() for key, tensor in back.items()}
    for tensor in theirs.values():
        tensor.zero_()
    assert all(torch.equal(back[key], tensor) for key, tensor in before.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == len(back)
    assert all(tensor.is_contiguous() for tensor in back.values())


def test_every_key_that_does_not_fit_is_listed() -> None:
    rules, ours = CASES["GPT-2"]
    names = KeyMap(rules, ours)
    theirs = names.to_theirs(ours, "")
    del theirs["h.x.c_attn.bias"]
    theirs["h.x.c_attn.weight"] = torch.zeros(18, 4)  # as many numbers, the other way round
    theirs |= {"z": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"file: ") as caught:
        names.to_ours(theirs, "file")
    assert str(caught.value) == (
        "file: the weights do not fit the model: missing h.x.c_attn.bias; unknown b, z; "
        "mis-shaped h.x.c_attn.weight [18, 4] (expected [4, 18])"
    )


def test_a_shape_of_as_many_numbers_is_still_wrong() -> None:
    rules, ours = CASES["convolution"]
    names = KeyMap(rules, ours)
    with pytest.raises(ValueError, match=r"mis-shaped conv \[5, 2, 2, 3\] \(expected \[5, 3, 2, 2\]\)"):
        names.to_ours({"conv": torch.zeros(5, 2, 2, 3)}, "")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("x.*", "a.*")], r"not covered \['b'\], claimed twice \[\]"),
        ([Rule("x.*", "a.*"), Rule("y", "b"), Rule("z.w", "a.w")], r"claimed twice \['a.w'\]"),
        ([Rule("x", "a.w"), Rule("x", "b")], r"claimed twice \['x'\]"),
        ([Rule("x", ("a.w", "c"), (Split(2),)), Rule("y", "b")], r"not covered \['c'\]"),
    ],
)
def test_a_table_that_is_no_bijection_is_refused(rules: list[Rule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyMap(rules, {"a.w": torch.zeros(2), "b": torch.zeros(2)})


def test_a_star_is_one_component() -> None:
    with pytest.raises(ValueError, match="not covered"):
        KeyMap([Rule("x.*", "a.*")], {"a.b.c": torch.zeros(1)})


def test_keys_that_fit_pass() -> None:
    check_keys({"a": torch.zeros(2)}, {"a": torch.zeros(2, device="meta")}, "")
