"""Published CLIPs of the same size, with our weights."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimodal.data import CLIPTokenizer
from multimodal.models.clip import CLIPConfig
from multimodal.pretrained import hf_clip, open_clip_folder
from tasks.peers import Attention, exported, from_pretrained, peer, plain
from tasks.workload import Data, Peer, Setting, Workload

CLASSES_AT_A_TIME = {"cpu": 1}
"""In the head of a zero-shot classifier; elsewhere open_clip's default, 10. On a CPU single ones are faster. Of 10 with
80 templates one layer of open_clip's ViT-B/32 took 9.5 s (all at a time 14.1) in float32 and 3.2 s (4.7) in bfloat16,
four of Hugging Face's 5.9 s (5.7) and 2.0 s (2.3): medians of three on one thread of a busy machine."""


def peers(work: Workload, setting: Setting) -> list[Peer]:
    """open_clip pads texts to the whole context; Hugging Face's, as its users run it, to the longest of a batch."""
    config: CLIPConfig = work.config
    length = config.text.context_length
    at_a_time = CLASSES_AT_A_TIME.get(setting.device.type, 10)
    told = f"classes at a time: {at_a_time}" if work.name.startswith("zero-shot") else ""

    def open_clip_work(model: Any, data: Data) -> Tensor:
        import open_clip

        if "labels" in data:
            head: Tensor = open_clip.build_zero_shot_classifier(
                model, _tokenizer(length), data["labels"], data["templates"], at_a_time, setting.device
            )
            return head.T
        if work.trains:
            loss: Tensor = open_clip.loss.ClipLoss()(*model(data["image"], data["tokens"]))
            return loss
        encode, inputs = (model.encode_text, "tokens") if _reads(work) else (model.encode_image, "image")
        features: Tensor = encode(data[inputs], normalize=True)
        return features

    def hugging_face_work(model: Any, data: Data) -> Tensor:
        if "labels" in data:
            return _hugging_face_head(model, data, CLIPTokenizer(length), setting.device, at_a_time)
        if work.trains:
            loss: Tensor = model(input_ids=data["tokens"], pixel_values=data["image"], return_loss=True).loss
            return loss
        if _reads(work):
            return _features(model.get_text_features(data["tokens"]))
        return _features(model.get_image_features(data["image"]))

    def padded(data: Data) -> Data:
        tokens = {"tokens": F.pad(data["tokens"], (0, length - data["tokens"].shape[1]))} if "tokens" in data else {}
        return {**data, **tokens}

    return [
        peer(
            "open_clip",
            "open-clip-torch",
            work,
            setting,
            lambda kind: _open_clip(config, kind),
            open_clip_work,
            told=told,
            prepare=padded,
            called=["" if work.trains else "encode_text" if _reads(work) else "encode_image"],
        ),
        peer(
            "Hugging Face",
            "transformers",
            work,
            setting,
            lambda kind: _hugging_face(config, kind),
            hugging_face_work,
            told=told,
            called=["" if work.trains else "get_text_features" if _reads(work) else "get_image_features"],
        ),
    ]


def _reads(work: Workload) -> bool:
    return work.name.startswith(("encode text", "zero-shot"))


@cache
def _tokenizer(context_length: int) -> Any:
    """open_clip's, which reads its vocabulary when it is made."""
    import open_clip

    return open_clip.SimpleTokenizer(context_length=context_length)


def _open_clip(config: CLIPConfig, kind: Attention) -> nn.Module:
    import open_clip

    def read(folder: Path) -> nn.Module:
        return open_clip.create_model(f"local-dir:{folder}")

    model: nn.Module = exported("clip", config, open_clip_folder.to_open_clip, read)
    return model if kind == "fused" else plain(model)


def _hugging_face(config: CLIPConfig, kind: Attention) -> nn.Module:
    from transformers import CLIPModel

    model: nn.Module = exported("clip", config, hf_clip.to_hf, lambda out: from_pretrained(CLIPModel, out, kind))
    return model


def _features(found: Any) -> Tensor:
    """Features of length 1."""
    return F.normalize(getattr(found, "pooler_output", found), dim=-1)  # a tensor before transformers 5


def _hugging_face_head(
    model: Any, data: Data, tokenizer: CLIPTokenizer, device: torch.device, at_a_time: int
) -> Tensor:
    """The features of the labels [C, E], each the mean over the templates."""
    templates, means = data["templates"], []
    for start in range(0, len(data["labels"]), at_a_time):
        labels = data["labels"][start : start + at_a_time]
        texts = [template.replace("{}", label) for label in labels for template in templates]
        features = _features(model.get_text_features(tokenizer(texts).to(device)))
        means.append(features.unflatten(0, (len(labels), -1)).mean(1))
    return F.normalize(torch.cat(means), dim=-1)
