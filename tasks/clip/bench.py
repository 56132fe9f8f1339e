"""What the benchmark measures of CLIP."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multimodal.data import CLIPTokenizer, ImagePreprocess
from multimodal.data.scenes import draw_scene
from multimodal.models.clip import CLIP, VISION, CLIPConfig, TextConfig
from tasks.clip.cache import Cache
from tasks.clip.embed import Embedder
from tasks.clip.samples import LABELS, text_id
from tasks.workload import Data, Setting, Subject, Workload, compiled, default_recipe, model_for, training

PAIRS, TEXTS = 16, 32
TEMPLATES = 80
"""Of OpenAI's for ImageNet."""
MANY = 1000
"""Classes that ImageNet has."""
SMALL = CLIPConfig(
    embed_dim=256,
    vision=replace(VISION, embed_dim=384, num_heads=6),
    text=TextConfig(embed_dim=256, depth=10, num_heads=4),
)
"""open_clip's ViT-S-32-alt."""


def workloads(size: str) -> list[Workload]:
    """A contrastive step, both towers, and the head of a zero-shot classifier; of a small model the step alone."""
    if size == "tiny":
        config, options = default_recipe("clip")
        return _works("CLIP, default recipe", config, options, classes=2, templates=4)
    full = _works("CLIP ViT-B/32", CLIPConfig(), {}, classes=20, templates=TEMPLATES)
    small = _works("CLIP ViT-S/32-alt", SMALL, {}, classes=20, templates=TEMPLATES)
    return [*full, *(work for work in small if work.trains)]


def captions(count: int) -> list[str]:
    """Of drawn scenes with one to three objects: 12 to 30 tokens, which is about what captions of photographs have."""
    return [draw_scene(0, index, objects=(1, 3)).caption for index in range(count)]


def templates(count: int) -> list[str]:
    """Texts with {} in place of a label."""
    from open_clip.zero_shot_metadata import OPENAI_IMAGENET_TEMPLATES

    return [make("{}") for make in OPENAI_IMAGENET_TEMPLATES[:count]]


def _clip(config: CLIPConfig, setting: Setting) -> CLIP:
    clip = model_for("clip", config, setting)
    assert isinstance(clip, CLIP)
    return clip


def _image_tower(clip: CLIP) -> list[nn.Module]:
    return [clip.vision, clip.vision_proj]


def _text_tower(clip: CLIP) -> list[nn.Module]:
    """Without its table of tokens."""
    return [clip.text.encoder, clip.text_proj]


def _works(model: str, config: CLIPConfig, options: dict[str, Any], *, classes: int, templates: int) -> list[Workload]:
    tokenizer = CLIPTokenizer(config.text.context_length)

    def pairs(texts: Sequence[str]) -> Data:
        count = len(texts)
        return {
            "image": torch.randn(count, config.vision.in_channels, *config.vision.image_hw),
            "tokens": tokenizer(texts),
            "image_id": torch.arange(count),
            "caption_id": torch.tensor([text_id(text) for text in texts]),
            "texts": list(texts),
        }

    def train(setting: Setting, data: Data) -> Subject:
        return training("clip", config, setting, data, **options)

    def image(setting: Setting, data: Data) -> Subject:
        clip, images = _clip(config, setting), data["image"].to(setting.dtype)
        run = compiled(clip.encode_image, setting)
        return Subject(run=lambda: run(images), model=clip)

    def text(setting: Setting, data: Data) -> Subject:
        clip, tokens = _clip(config, setting), data["tokens"]
        run = compiled(clip.encode_text, setting)
        return Subject(run=lambda: run(tokens), model=clip)

    def work(name: str, texts: list[str], **more: Any) -> Workload:
        given: dict[str, Any] = {
            "model": model,
            "name": name,
            "batch": len(texts),
            "data": lambda: pairs(texts),
            "config": config,
        }
        return Workload(**given, **more)

    full = ["circle " * config.text.context_length] * PAIRS
    return [
        work("train, captions", captions(PAIRS), ours=train, trains=True, unit="pairs"),
        work("train, longest texts", full, ours=train, trains=True, unit="pairs"),
        work("encode image", captions(1), ours=image, unit="images", reads=_image_tower),
        work("encode image", captions(PAIRS), ours=image, unit="images", reads=_image_tower),
        work("encode text", captions(1), ours=text, unit="texts", reads=_text_tower),
        work("encode text", captions(TEXTS), ours=text, unit="texts", reads=_text_tower),
        _zero_shot(model, config, tokenizer, classes, templates),
    ]


def _zero_shot(model: str, config: CLIPConfig, tokenizer: CLIPTokenizer, classes: int, count: int) -> Workload:
    """The features of classes, each the mean over templates: from words to vectors."""

    def data() -> Data:
        return {"labels": list(LABELS[:classes]), "templates": templates(count)}

    def ours(setting: Setting, data: Data) -> Subject:
        clip = _clip(config, setting)
        unused = ImagePreprocess(mean=(0.5,), std=(0.5,), size=config.vision.image_hw), Cache(Path())
        embedder = Embedder(clip, unused[0], tokenizer, setting.device, unused[1])
        return Subject(run=lambda: embedder.means(data["labels"], data["templates"]), model=clip)

    return Workload(
        model=model,
        name=f"zero-shot head, {classes} classes × {count} templates",
        batch=classes,
        data=data,
        ours=ours,
        config=config,
        unit="texts",
        items=classes * count,
        reads=_text_tower,
        told=lambda seconds: f"{MANY * seconds / classes:.3g} s for {MANY:,} classes, extrapolated from {classes}",
        compiles=False,
    )
