"""How works are timed, and how their operations are counted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multimodal.linear import PackedWeight
from multimodal.models import model_classes
from multimodal.models.vit import ViT, ViTConfig
from tasks import registry
from tasks.flops import flops_of
from tasks.timing import Runner, Stopwatch, Times, interleave, trial
from tasks.workload import Setting, Subject, Workload, weight_bytes, with_attention

CPU = torch.device("cpu")
FP32, BF16 = (Setting(device=CPU, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))


def work(**fields: Any) -> Workload:
    given = {"model": "m", "name": "w", "batch": 1, "data": dict, "ours": lambda setting, data: None}
    return Workload(**(given | fields))


def scripted(log: list[str], name: str, ms: list[float]) -> Callable[[], list[float]]:
    """A runner whose calls last as long as is written; the last one repeats."""
    calls = iter(ms)
    last = ms[-1]

    def call() -> list[float]:
        log.append(name)
        return [next(calls, last)]

    return call


# ------------------------------------------------------------------------------------------------------------ rounds


def test_rounds_are_interleaved_and_the_first_call_of_each_is_not_counted() -> None:
    log: list[str] = []
    runners = {name: scripted(log, name, [1450.0, 400.0, 1400.0, 400.0, 1400.0, 300.0, 1400.0, 500.0]) for name in "ab"}
    seconds: list[float] = []
    times = interleave(runners, 3, told=seconds.append)
    assert "".join(log) == "aabb" + "aabb" + "bbaa" + "bbaa"
    assert times["a"].rounds == times["b"].rounds == [400.0, 300.0, 500.0]
    assert times["a"].median == 400.0
    assert seconds == [pytest.approx(4.8)]


def test_long_calls_need_no_call_before_them() -> None:
    log: list[str] = []
    times = interleave({"a": scripted(log, "a", [1600.0]), "b": scripted(log, "b", [400.0])}, 2)
    assert "".join(log) == "abb" + "abb" + "bba"
    assert times["a"].rounds == [1600.0] * 2


def test_who_is_first_changes_and_so_does_the_direction() -> None:
    log: list[str] = []
    interleave({name: scripted(log, name, [400.0]) for name in "abc"}, 6)
    rounds = "".join(log[6:])
    firsts = [rounds[at : at + 6 : 2] for at in range(0, len(rounds), 6)]
    assert firsts == ["abc", "bca", "cab", "cba", "acb", "bac"]


def test_what_is_fast_is_called_more_often_and_what_is_slow_less() -> None:
    log: list[str] = []
    times = interleave({"a": scripted(log, "a", [30.0]), "b": scripted(log, "b", [0.001])}, 2)
    assert len(times["a"].calls) == 2 * 10
    assert len(times["b"].calls) == 2 * 20
    times = interleave({"a": scripted(log, "a", [200.0])}, 2, least_calls=3)
    assert len(times["a"].calls) == 2 * 3
    log.clear()
    times = interleave({"a": scripted(log, "a", [20_000.0])}, 7)
    assert len(log) == 1 + 3
    assert times["a"].rounds == [20_000.0] * 3


def test_a_trial_warms_up() -> None:
    assert trial(scripted([], "a", [2500.0, 5.0, 4.0])) == 5.0
    assert trial(scripted([], "a", [20_000.0, 5.0])) == 20_000.0
    assert trial(scripted([], "a", [1.0, 300.0, 290.0, 1.0])) == 290.0


def test_a_trial_calls_what_is_fast_as_often_as_a_round_does() -> None:
    log: list[str] = []
    assert trial(scripted(log, "a", [1.0, 5.0, 9.0, 9.0, 4.0, 5.0])) == 4.0
    assert len(log) == 1 + 20


def test_percentiles_and_doubt() -> None:
    times = Times(rounds=[10.0, 11.0, 12.0], calls=[[float(ms)] for ms in range(1, 21)])
    assert times.percentile(0.5) == 10.5
    assert times.percentile(0.95) == pytest.approx(19.05)
    assert Times(calls=[[1.0]] * 19).percentile(0.95) is None
    assert not times.doubtful
    assert Times(rounds=[10.0, 11.0, 13.0]).doubtful
    assert Times(calls=[[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]]).parts == [3.0, 4.0]


# ------------------------------------------------------------------------------------------------------------- calls


def test_a_stopwatch_goes_on() -> None:
    watch = Stopwatch(CPU)
    for _ in range(3):
        watch.mark()
    assert len(watch.laps()) == 2
    assert min(watch.laps()) >= 0


def test_a_training_step_changes_what_asks_for_gradients_and_has_three_parts() -> None:
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    weight, bias = model.weight.clone(), model.bias.clone()
    x = torch.randn(2, 4)
    runner = Runner(Subject(run=lambda: model(x).square().mean(), model=model), work(trains=True, lr=0.1), FP32)
    assert len(runner()) == 3
    assert (model.weight - weight).abs().min() > 0.05
    assert model.bias.equal(bias)
    assert model.weight.grad is None


def test_training_in_bfloat16_is_autocast_and_gradients_are_clipped() -> None:
    model, seen = nn.Linear(4, 4), []
    x = torch.full((2, 4), 1e6)

    def run() -> Tensor:
        out = model(x)
        seen.append((out.dtype, torch.is_grad_enabled()))
        return out.float().square().mean()

    runner = Runner(Subject(run=run, model=model), work(trains=True, clip=1e-3), BF16)
    norms = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: norms.append(float(weight.grad.norm())))
    step = runner._optimizer
    assert step is not None
    step.register_step_pre_hook(lambda *_: norms.append(float(model.weight.grad.norm())))
    runner()
    assert seen == [(torch.bfloat16, True)]
    assert norms == [pytest.approx(norms[0]), pytest.approx(1e-3, rel=1e-4)]
    assert norms[0] > 1


def test_what_is_not_trained_keeps_no_graph() -> None:
    seen: list[bool] = []
    subject = Subject(run=lambda: seen.append(torch.is_inference_mode_enabled()), model=None)
    assert len(Runner(subject, work(), FP32)()) == 1
    assert seen == [True]
    with pytest.raises(ValueError, match="nothing to train"):
        Runner(subject, work(trains=True), FP32)


def test_a_loss_that_is_not_finite_is_told() -> None:
    model = nn.Linear(1, 1)
    runner = Runner(Subject(run=lambda: model.weight.sum() / 0, model=model), work(trains=True), FP32)
    with pytest.raises(ValueError, match=r"the loss is -?inf, expected a finite one"):
        runner()


# -------------------------------------------------------------------------------------------------------- operations


def test_operations_of_a_linear_are_exact() -> None:
    model, x = nn.Linear(8, 16), torch.randn(4, 8)
    forward = 2 * 4 * 8 * 16
    infer = Subject(run=lambda: model(x), model=model)
    assert flops_of(Runner(infer, work(), FP32)) == forward
    model.requires_grad_(True)
    train = Subject(run=lambda: model(x).sum(), model=model)
    # Backward the weight's gradient alone: the input asks for none.
    assert flops_of(Runner(train, work(trains=True), FP32)) == 2 * forward
    assert model.weight.grad is None


@pytest.mark.parametrize("attention", ["naive", "sdpa", "auto"])
@pytest.mark.parametrize("setting", [FP32, BF16], ids=["32", "bf16"])
def test_operations_of_a_transformer_are_exact(setting: Setting, attention: str) -> None:
    dim, depth, tokens, batch, classes, patch = 32, 2, 16, 3, 7, 4
    config = ViTConfig(
        image_size=16, patch_size=patch, embed_dim=dim, depth=depth, num_heads=2, num_classes=classes, pool="mean",
        class_token=False,
    )  # fmt: skip
    vit = ViT(with_attention(config, attention)).eval().to(setting.dtype)
    images = torch.randn(batch, 3, 16, 16, dtype=setting.dtype)
    block = tokens * dim * (3 * dim + dim + 8 * dim) + 2 * tokens * tokens * dim
    expected = 2 * batch * (tokens * 3 * patch**2 * dim + depth * block + dim * classes)
    assert flops_of(Runner(Subject(run=lambda: vit(images), model=vit), work(), setting)) == expected


def test_operations_of_what_torch_does_not_count() -> None:
    batch, tokens, width = 2, 5, 16
    attention, x = nn.MultiheadAttention(width, 4, batch_first=True).eval(), torch.randn(batch, tokens, width)
    expected = 2 * batch * (4 * tokens * width**2 + 2 * tokens**2 * width)
    fast = Subject(run=lambda: attention(x, x, x, need_weights=False), model=attention)
    assert flops_of(Runner(fast, work(), FP32)) == expected
    packed, weight = PackedWeight(), nn.Parameter(torch.randn(24, width), requires_grad=False)
    product = Subject(run=lambda: packed(x, weight), model=nn.Identity())
    assert flops_of(Runner(product, work(), FP32)) == 2 * batch * tokens * width * 24


@pytest.mark.parametrize(
    ("task", "name", "parts"),
    [
        ("clip", "encode image", ("vision.", "vision_proj.")),
        ("clip", "encode text", ("text.encoder.", "text_proj.")),
        ("clip", "zero-shot", ("text.encoder.", "text_proj.")),
        ("whisper", "encoder", ("stem.", "encoder.")),
        ("whisper", "decode 20", ("embed.", "decoder.")),
        ("dt", "60 actions", ("embed_return.", "embed_state.", "embed_action.", "embed_norm.", "encoder.", "predict_")),
        ("vit", "inference", ("",)),
        ("detr", "train", ("",)),
    ],
)
def test_weights_that_a_call_must_move(task: str, name: str, parts: tuple[str, ...]) -> None:
    record = registry.get(task)
    one = next(one for one in record.load(str(record.benchmark))("tiny") if one.name.startswith(name))
    model = model_classes(task)[0](one.config)
    read = [weight.numel() for key, weight in model.named_parameters() if key.startswith(parts)]
    times = {"decode 20": 20, "60 actions": 60, "train": 10}.get(name, 1)
    assert weight_bytes(one, model) == 4 * times * sum(read)


def test_another_kernel_goes_into_every_stack_without_the_options_of_the_old_one() -> None:
    from multimodal.models.whisper import TINY, WhisperConfig

    config = WhisperConfig(encoder=replace(TINY, attention="local", attention_options={"window": 8}))
    other = with_attention(config, "naive")
    assert (other.encoder.attention, other.encoder.attention_options) == ("naive", {})
    assert other.decoder.attention == "naive"
    assert with_attention(config, None) is config


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.vit import bench

    seen: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function: seen.append(function) or function)
    monkeypatch.setattr(nn.Module, "compile", lambda self: seen.append(self))
    compiled = Setting(device=CPU, dtype=torch.float32, compile=True)
    for one in bench.workloads("tiny"):
        for setting in (FP32, compiled):
            subject = one.ours(setting, one.data())
            assert seen == ([subject.model] if setting.compile and one.compiles else [])
            subject.run()
            seen.clear()
