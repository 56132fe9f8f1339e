"""The task's module: its losses, micro-batches, and the towers that it starts from and locks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multimodal import pretrained
from multimodal.blocks import Stack
from multimodal.data import ImagePreprocess
from multimodal.models.clip import CLIP, CLIPConfig, TextConfig
from multimodal.models.vit import ViT, ViTConfig
from multimodal.pretrained import Checkpoint
from tasks.base import Batch
from tasks.clip.losses import contrastive_loss
from tasks.clip.task import CLIPModule
from tests.tasks.commands import PLAIN, Run

VISION = ViTConfig(image_size=16, patch_size=8, embed_dim=8, depth=2, num_heads=2, num_classes=0)
TEXT = TextConfig(embed_dim=8, depth=2, num_heads=2, vocab_size=50, end_token=49, context_length=12)
TINY: dict[str, Any] = {"embed_dim": 8, "vision": VISION, "text": TEXT}
SIGMOID: dict[str, Any] = {"criterion": "sigmoid", "logit_bias": -2.0}


def module(**options: Any) -> CLIPModule:
    return CLIPModule(**(TINY | options))


def batch(count: int = 7) -> Batch:
    """Pairs of noise; the first two are of one image, and the last two captions mean the same."""
    tokens = torch.randint(1, 49, (count, 9))
    tokens[torch.arange(count), torch.randint(1, 9, (count,))] = 49
    image_id, caption_id = torch.arange(count), torch.arange(count) + 100
    image_id[1], caption_id[-1] = image_id[0], caption_id[-2]
    return {
        "image": torch.randn(count, 3, 16, 16),
        "tokens": tokens,
        "image_id": image_id,
        "caption_id": caption_id,
        "caption_of": image_id.clone(),
    }


def gradients(ours: CLIPModule, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    ours.zero_grad()
    loss = ours.loss(batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in ours.model.named_parameters() if p.grad is not None}


# Losses


def test_captions_of_one_image_and_equal_captions_are_right_answers() -> None:
    ours, pairs = module(), batch()
    output = ours.model(pairs["image"], pairs["tokens"])
    right = torch.eye(7, dtype=torch.bool)
    right[0, 1] = right[1, 0] = right[5, 6] = right[6, 5] = True
    expected = contrastive_loss(output.image_features, output.text_features, output.logit_scale, right)
    assert ours.loss(pairs).item() == pytest.approx(expected.item(), rel=1e-6)
    alone = contrastive_loss(output.image_features, output.text_features, output.logit_scale)
    assert ours.loss(pairs).item() != pytest.approx(alone.item(), rel=1e-3)


@pytest.mark.parametrize("options", [{}, SIGMOID, {"logit_bias": -2.0}], ids=["infonce", "sigmoid", "with a bias"])
def test_every_parameter_gets_a_gradient(options: dict[str, Any]) -> None:
    ours = module(**options).train()
    loss, found = gradients(ours, batch())
    assert loss.isfinite()
    assert found.keys() == dict(ours.model.named_parameters()).keys()
    assert all(gradient.isfinite().all() for gradient in found.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "sigmoid"}, "logit_bias is null, expected a number such as -10 with criterion sigmoid"),
        ({"micro_batch": 0}, "micro_batch is 0, expected at least 1"),
        ({"init_vision": "none.safetensors"}, "none.safetensors: no such file or folder"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_the_scale_stays_in_its_range() -> None:
    ours = module(logit_scale=math.log(100))
    optimizer = torch.optim.SGD(ours.model.parameters(), lr=1.0)
    ours.model.logit_scale.grad = torch.tensor([-3.0])
    ours.optimizer_step(0, 0, optimizer, None)
    assert ours.model.logit_scale.item() == pytest.approx(math.log(100))


# Micro-batches


@pytest.mark.parametrize("options", [{}, SIGMOID], ids=["infonce", "sigmoid"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_micro_batches_give_the_gradients_of_the_whole_batch(options: dict[str, Any], size: int) -> None:
    whole, small = module(**options).double(), module(**options, micro_batch=size).double()
    small.model.load_state_dict(whole.model.state_dict())
    pairs = batch()
    pairs = {**pairs, "image": pairs["image"].double()}
    (loss, expected), (again, found) = gradients(whole, pairs), gradients(small, pairs)
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    largest = max(1.0, *(float(value.abs().max()) for value in expected.values()))
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-6 * largest


def test_micro_batches_are_no_mean_of_small_losses() -> None:
    ours, pairs = module(micro_batch=3), batch(6)
    small = [ours.loss({name: value[start : start + 3] for name, value in pairs.items()}) for start in (0, 3)]
    assert ours.loss(pairs).item() > sum(loss.item() for loss in small) / 2 + 0.3


def test_dropout_leaves_out_the_same_when_a_micro_batch_is_computed_again() -> None:
    """As chunks that are kept, under the same random numbers."""
    options = {"vision": replace(VISION, dropout=0.3, drop_path=0.3), "text": replace(TEXT, dropout=0.3)}
    ours, pairs = module(**options, micro_batch=3).train(), batch(6)
    torch.manual_seed(5)
    loss, found = gradients(ours, pairs)

    model = ours.model
    model.zero_grad()
    torch.manual_seed(5)
    images, texts = (
        torch.cat([encode(part) for part in pairs[name].split(3)])
        for encode, name in ((model.encode_image, "image"), (model.encode_text, "tokens"))
    )
    right = (pairs["image_id"][:, None] == pairs["image_id"]) | (pairs["caption_id"][:, None] == pairs["caption_id"])
    expected = contrastive_loss(images, texts, model.logit_scale[0].exp(), right)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_fewer_images_are_in_a_tower_at_a_time() -> None:
    ours, sizes = module(micro_batch=2).train(), []
    for part in ours.model.modules():
        if isinstance(part, Stack):
            part.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    ours.loss(batch(7)).backward()
    assert set(sizes) == {1, 2}
    assert len(sizes) == 2 * 2 * 4, "two towers, forward and again, four chunks"


# Towers to start from


def vit(path: Path, **config: Any) -> ViT:
    torch.manual_seed(1)
    values = {"image_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 3, "num_classes": 5}
    model = ViT(ViTConfig(**(values | {"drop_path": 0.2} | config)))
    size = model.config.image_hw
    preprocess = ImagePreprocess(size=size, mean=(0.5,) * 3, std=(0.5,) * 3).to_dict()
    pretrained.save(path, Checkpoint.of("vit", model, preprocess=preprocess, labels=list("abcde")))
    return model.eval()


def clip(path: Path, **config: Any) -> CLIP:
    torch.manual_seed(2)
    model = CLIP(CLIPConfig(**(TINY | {"text": replace(TEXT, activation="quick_gelu")} | config)))
    pretrained.save(path, Checkpoint.of("clip", model))
    return model.eval()


def test_the_image_tower_starts_from_a_vit(tmp_path: Path) -> None:
    source = vit(tmp_path / "vit.safetensors")
    ours = module(init_vision=str(tmp_path / "vit.safetensors")).eval()
    vision = ours.model.vision
    assert (vision.config.patch_size, vision.config.embed_dim, vision.config.num_classes) == (4, 12, 0)
    assert vision.config.drop_path == 0.0, "what concerns training alone is this run's own"
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(vision(images), source.forward_features(images))
    assert ours.model.config.vision == vision.config
    larger = replace(VISION, image_size=32)
    assert module(init_vision=str(tmp_path / "vit.safetensors"), vision=larger).model.vision.position.shape == (65, 12)


def test_towers_start_from_those_of_a_clip(tmp_path: Path) -> None:
    source = clip(tmp_path / "clip.safetensors")
    path = str(tmp_path / "clip.safetensors")
    short = replace(TEXT, context_length=9, depth=1)
    ours = module(init_vision=path, init_text=path, text=short).eval()
    assert ours.model.text.config.activation == "quick_gelu"
    assert ours.model.text.config.depth == 2
    pairs = batch()
    assert torch.equal(ours.model.vision(pairs["image"]), source.vision(pairs["image"]))
    assert torch.equal(ours.model.text(pairs["tokens"]), source.text(pairs["tokens"]))
    longer = replace(TEXT, context_length=13)
    with pytest.raises(ValueError, match=r"model\.text\.context_length is 13, expected at most the 12 of .*clip"):
        module(init_text=path, text=longer)


def test_a_source_without_that_tower_is_refused(tmp_path: Path) -> None:
    vit(tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"model\.init_text .*: holds a model of task 'vit', expected 'clip'"):
        module(init_text=str(tmp_path / "vit.safetensors"))


def test_a_locked_image_tower_stays_as_it_is(tmp_path: Path) -> None:
    vit(tmp_path / "vit.safetensors")
    dropout = replace(VISION, dropout=0.5)
    ours = module(init_vision=str(tmp_path / "vit.safetensors"), vision=dropout, lock_image=True).train()
    assert not any(part.training for part in ours.model.vision.modules())
    assert ours.model.text.training
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(ours.model.encode_image(images), ours.model.encode_image(images))
    _, found = gradients(ours, batch())
    trained = {name.split(".")[0] for name in found}
    assert trained == {"vision_proj", "text", "text_proj", "logit_scale"}


def test_a_locked_text_tower_stays_as_it_is() -> None:
    ours = module(text=replace(TEXT, dropout=0.5), lock_text=True).train()
    assert not any(part.training for part in ours.model.text.modules())
    assert ours.model.vision.training
    _, found = gradients(ours, batch())
    assert {name.split(".")[0] for name in found} == {"vision", "vision_proj", "text_proj", "logit_scale"}


def test_two_locked_towers_are_refused() -> None:
    with pytest.raises(ValueError, match="lock_image and lock_text are both true"):
        module(lock_image=True, lock_text=True)


def test_weights_start_a_run_with_another_image_size_and_another_loss(tmp_path: Path) -> None:
    source = clip(tmp_path / "clip.safetensors")
    checkpoint = pretrained.read(tmp_path / "clip.safetensors")
    text = source.config.text
    ours = module(vision=replace(VISION, image_size=32), text=text, **SIGMOID)
    ours.load_pretrained(checkpoint, "here")
    assert ours.model.logit_bias.item() == -2
    assert torch.equal(ours.model.text_proj.weight, source.text_proj.weight)
    assert ours.model.vision.position.shape == (17, 8)
    with pytest.raises(ValueError, match=r"^here: .*text\.encoder\.blocks\.2\."):
        module(text=replace(text, depth=3)).load_pretrained(checkpoint, "here")


# Through the command line


def test_lit_through_the_command_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = vit(Path("vit.safetensors"), image_size=32, patch_size=16)
    flags = [*PLAIN["clip"], "--model.ema_decay", "null", "--trainer.max_steps", "3", "--model.lock_image", "true"]
    with pytest.warns(UserWarning, match=r"vit.safetensors was trained with data.mean \[0.5, 0.5, 0.5\] and data.std"):
        assert run("fit", "clip", *flags, "--model.init_vision", "vit.safetensors").code == 0
    (folder,) = Path("runs/clip").iterdir()
    loaded = pretrained.load(folder, task="clip")
    assert loaded.tokenizer == {"kind": "clip_bpe", "context_length": 32}
    state = loaded.model.vision.state_dict()
    assert all(torch.equal(state[name], value) for name, value in source.state_dict().items() if "head" not in name)
    assert run("test", "clip", "--checkpoint", folder).code == 0
    refused = run("fit", "clip", *flags)
    assert "lock_image needs init_vision or --init: without it random weights would be locked" in refused.error


def test_one_pair_is_nothing_to_learn_from(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("fit", "clip", *PLAIN["clip"], "--data.batch_size", "1")
    assert "data.batch_size is 1, of which nothing can be learned: expected at least 2 pairs" in result.error


def test_clipping_and_accumulation_work_with_micro_batches(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run, whatever the size of the micro-batches."""
    monkeypatch.chdir(tmp_path)
    losses = []
    for name, size in (("whole", "null"), ("parts", "3")):
        flags = [*PLAIN["clip"], "--trainer.precision", "32-true", "--trainer.max_epochs", "1"]
        flags += ["--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "0.1"]
        result = run("fit", "clip", *flags, "--model.micro_batch", size, "--trainer.default_root_dir", name)
        assert result.code == 0, result.err
        (folder,) = Path(name, "clip").iterdir()
        state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        assert state["global_step"] == 3
        losses.append(state["state_dict"])
    for name, value in losses[0].items():
        assert torch.allclose(value, losses[1][name], atol=2e-4), name
