"""Published implementations do the same work as ours: from equal weights equal outputs, losses, tokens and actions."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from multimodal import pretrained
from multimodal.blocks import StackConfig
from multimodal.data.audio import LogMel
from multimodal.models.clip import CLIPConfig, TextConfig
from multimodal.models.decision_transformer import DecisionTransformerConfig
from multimodal.models.detr import DETRConfig
from multimodal.models.vit import ViTConfig
from multimodal.models.whisper import LAYERS, WhisperConfig
from tasks import registry
from tasks.clip import bench as clip_bench
from tasks.detr import bench as detr_bench
from tasks.dt import bench as dt_bench
from tasks.peers import exported, forget_exports
from tasks.vit import bench as vit_bench
from tasks.whisper import bench as whisper_bench
from tasks.workload import Data, Peer, Setting, Subject, Workload, parameters_of
from tests.parity.keys import assert_close

CPU = Setting(device=torch.device("cpu"), dtype=torch.float32)
SMALL: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2}
VIT = ViTConfig(**SMALL, image_size=32, patch_size=16, num_classes=10)
CLIP = CLIPConfig(
    embed_dim=32,
    vision=ViTConfig(
        **SMALL,
        image_size=32,
        patch_size=16,
        num_classes=0,
        norm_eps=1e-5,
        init="clip",
        patch_bias=False,
        pre_norm=True,
    ),
    text=TextConfig(**SMALL, context_length=40),
)
LAYER = StackConfig(**LAYERS, **SMALL)
WHISPER = WhisperConfig(encoder=LAYER, decoder=LAYER, audio_context=100)
DT = DecisionTransformerConfig(
    state_shape=(3,), action_dim=2, context_length=4, dropout=0, attention_dropout=0, embed_dropout=0
)
HOPPER_STEPS = 9
"""Twice as many as the window has, and one."""


def works() -> Iterator[tuple[str, Workload]]:
    """Of small models of the published kinds, by task."""
    prompt, end = whisper_bench.PROMPT, whisper_bench.END
    speech = whisper_bench._Works("", WHISPER, LogMel(), prompt=prompt, end=end, tokens=6)
    acting = replace(dt_bench._works("", DT, {})[3], data=lambda: dt_bench._episodes(DT, 2, HOPPER_STEPS))
    for task, found in (
        ("vit", vit_bench._works("", VIT, {})),
        ("clip", clip_bench._works("", CLIP, {}, classes=3, templates=2)),
        (
            "whisper",
            [
                speech.decoding(2),
                *(work for work in speech.all({}) if not work.name.startswith(("decode", "log-mel"))),
            ],
        ),
        ("dt", [dt_bench._works("", DT, {})[0], acting]),
    ):
        yield from ((task, work) for work in found)


WORKS = {f"{task}, {work.name}, {work.batch}": (task, work) for task, work in works()}
OWN_WEIGHTS = {"torchvision", "vit-pytorch", "x-transformers", "nanodt"}
"""Which are not built from weights of ours: the same size, computed in another order."""

SAME_COUNT = {"timm", "open_clip", "openai-whisper", "faster-whisper"}
"""Hugging Face's counts fixed positions and unused heads as parameters."""


def built(make: Callable[[Data], Subject], data: Data) -> Subject:
    torch.manual_seed(0)
    return make(data)


def plain(found: Any) -> Tensor:
    """What a work answers, as one tensor."""
    return found.detach() if isinstance(found, Tensor) else torch.from_numpy(np.array(found, dtype=np.float32))


def peers_of(task: str, work: Workload, setting: Setting = CPU) -> list[Peer]:
    found: list[Peer] = registry.get(task).load(registry.get(task).peers)(work, setting)
    return found


@pytest.mark.parametrize("name", WORKS)
def test_equal_weights_give_equal_answers(name: str) -> None:
    task, work = WORKS[name]
    data = work.data()
    ours = built(lambda data: work.ours(CPU, data), data)
    with torch.inference_mode(not work.trains):
        expected = plain(ours.run())
    compared = 0
    for peer in peers_of(task, work):
        for form in peer.forms.values():
            try:
                subject = built(form, data)
            except ModuleNotFoundError:
                continue
            with torch.inference_mode(not work.trains):
                found = plain(subject.run())
            if peer.name in OWN_WEIGHTS:
                assert found.shape == expected.shape
            elif "int8" not in peer.name:
                compared += 1
                assert_close(found.reshape(expected.shape), expected)
                if peer.name in SAME_COUNT:
                    assert parameters_of(subject) == parameters_of(ours)
    assert compared


def test_spectrograms() -> None:
    mel = whisper_bench._Works("", WhisperConfig(), LogMel(), prompt=(), end=0, tokens=0)
    work = mel.all({})[0]
    data = work.data()
    expected = plain(work.ours(CPU, data).run())
    for peer in peers_of("whisper", work):
        found = plain(next(iter(peer.forms.values()))(data).run())
        whole = expected.shape[-1] - 2  # faster-whisper has zeros where the others reflect the end
        assert_close(found[..., :whole], expected[..., :whole])


def test_detr_answers_alike() -> None:
    small = {"embed_dim": 32, "depth": 1, "num_heads": 4, "dropout": 0.0, "mlp_dropout": 0.0}
    full = DETRConfig()
    config = replace(
        full,
        num_classes=3,
        num_queries=5,
        backbone="resnet10t",
        encoder=replace(full.encoder, **small),
        decoder=replace(full.decoder, **small),
    )
    for work in detr_bench._works("", config, {}, side=64)[:2]:
        data = work.data()
        count = parameters_of(work.ours(CPU, data))
        for form in peers_of("detr", work)[0].forms.values():
            subject = form(data)
            assert subject.model is not None
            assert parameters_of(subject) == count
            ours = pretrained.load(subject.model).model
            with torch.no_grad():
                found = ours(data["image"])
                if work.trains:
                    assert subject.run().isfinite()
                else:
                    theirs = subject.run()
                    assert_close(theirs.logits, found.logits)
                    assert_close(theirs.pred_boxes, found.boxes)


def test_the_losses_of_detr_have_equal_gradients() -> None:
    work = detr_bench.losses("", replace(DETRConfig(), num_classes=5, num_queries=9))
    data = work.data()
    ours = work.ours(CPU, data)
    (peer,) = peers_of("detr", work)
    (form,) = peer.forms.values()
    theirs = form(data)
    with torch.inference_mode():  # as the frame does
        expected, found = ours.run(), theirs.run()
    assert [gradient.shape for gradient in expected] == [(6, 2, 9, 6), (6, 2, 9, 4)]
    for a, b in zip(found, expected, strict=True):
        assert_close(a / b.abs().max(), b / b.abs().max())


def test_the_optimizer_alone() -> None:
    work = vit_bench.optimizer("", VIT)
    ours = work.ours(CPU, {})
    subjects = [ours, *(form({}) for peer in peers_of("vit", work) for form in peer.forms.values())]
    told = []
    for subject in subjects:
        steps = subject.run.__self__  # type: ignore[attr-defined]
        weight = steps.param_groups[0]["params"][0]
        before = weight.clone()
        with torch.inference_mode():
            subject.run()
        assert ((weight - before).abs() < 2e-5).all()
        assert not weight.equal(before)
        assert subject.parameters == ours.parameters
        told.append({name: steps.defaults[name] for name in ("fused", "foreach")})
    assert told == [
        {"fused": True, "foreach": None},
        {"fused": None, "foreach": False},
        {"fused": None, "foreach": True},
    ]


def test_the_head_of_a_classifier_says_what_a_thousand_classes_take() -> None:
    (head,) = (work for work in clip_bench.workloads("published") if work.told is not None)
    assert head.told(8.0) == "400 s for 1,000 classes, extrapolated from 20"


def test_the_head_of_a_classifier_takes_a_class_at_a_time_on_a_cpu() -> None:
    task, head = next(one for name, one in WORKS.items() if "zero-shot" in name)
    for device, count in (("cpu", 1), ("cuda", 10)):
        for peer in peers_of(task, head, replace(CPU, device=torch.device(device))):
            assert all(form.endswith(f"classes at a time: {count}") for form in peer.forms)
    data = head.data()
    for peer in peers_of(task, head):
        seen: list[int] = []
        subject = built(peer.forms["fused, classes at a time: 1"], data)
        assert subject.model is not None
        for module in subject.model.modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings == CLIP.text.vocab_size:
                module.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given[0])))
        with torch.inference_mode():
            subject.run()
        assert seen == [len(data["templates"])] * len(data["labels"])


def test_what_hugging_face_compiles_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []
    caches: list[str] = []

    def note(self: Any, **options: Any) -> None:
        self._compiled_call_impl = self._call_impl
        self.register_forward_hook(lambda module, *_: called.append(module))
        if hasattr(self, "proj_out"):
            self.model.decoder.register_forward_pre_hook(
                lambda _, args, more: caches.extend(
                    type(one.self_attention_cache).__name__
                    for one in more.values()
                    if hasattr(one, "self_attention_cache")
                ),
                with_kwargs=True,
            )

    monkeypatch.setattr(nn.Module, "compile", note)
    task, work = WORKS["whisper, decode 6 tokens, 2"]
    data = work.data()
    openai, hugging_face = peers_of(task, work, replace(CPU, compile=True))[:2]
    assert list(openai.forms) == ["fused", "fused, encoder compiled"]
    assert list(hugging_face.forms) == ["fused", "fused, static cache, compiled"]
    subject = built(hugging_face.forms["fused, static cache, compiled"], data)
    with torch.inference_mode():
        found = subject.run()
        assert found == built(lambda data: work.ours(CPU, data), data).run()
    model: Any = subject.model
    assert called == [model.model.encoder] + [model] * 6
    assert caches == ["StaticCache"] * 6


def test_one_export_serves_all_works_of_a_model() -> None:
    written: list[Path] = []

    def write(checkpoint: Any, out: Path) -> None:
        written.append(out)
        out.write_text("")

    def read(out: Path) -> Path:
        return out

    first, again = (exported("vit", VIT, write, read, suffix=".txt") for _ in range(2))
    assert first == again
    assert first.name == "peer.txt"
    assert first.exists()
    other = exported("vit", replace(VIT, depth=1), write, read)
    assert written == [first, other]
    assert not first.exists()
    forget_exports()
    assert not other.parent.exists()


def test_a_form_says_what_it_cannot_express() -> None:
    work = replace(WORKS["vit, inference, 1"][1], config=replace(VIT, pool="mean", class_token=False))
    forms = {peer.name: peer.forms for peer in peers_of("vit", work)}
    with pytest.raises(ValueError, match="cannot express pool 'mean'"):
        forms["Hugging Face"]["fused"](work.data())


@pytest.mark.parametrize(
    "name",
    ["clip, train, captions, 16", "clip, encode image, 1", "clip, encode text, 1", "whisper, encoder, 1"]
    + [name for name in WORKS if "zero-shot" in name],
)
def test_what_is_compiled_is_what_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def noting(function: Any, **options: Any) -> Any:
        return lambda *args, **more: called.append(function) or function(*args, **more)

    def note(self: nn.Module, **options: Any) -> None:
        self.register_forward_hook(lambda *_: called.append(self))

    monkeypatch.setattr(torch, "compile", noting)
    monkeypatch.setattr(nn.Module, "compile", note)
    task, work = WORKS[name]
    data = work.data()
    for peer in peers_of(task, work, replace(CPU, compile=True))[:2]:
        *_, last = peer.forms
        assert last.endswith("compiled")
        subject = built(peer.forms[last], data)
        called.clear()
        with torch.inference_mode(not work.trains):
            subject.run()
        assert called, peer.name


def test_compiled_forms_only_where_asked() -> None:
    work = WORKS["vit, train, 8"][1]
    assert list(peers_of("vit", work)[0].forms) == ["fused", "plain"]
    bf16 = replace(CPU, dtype=torch.bfloat16, compile=True)
    assert list(peers_of("vit", work, bf16)[0].forms) == ["plain", "plain, compiled"]
    assert list(peers_of("vit", work, replace(CPU, compile=True))[0].forms) == ["fused", "fused, compiled"]
