"""A CLIP with random weights, and what it says by the model alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimodal import pretrained
from multimodal.data import CLIPTokenizer, ImagePreprocess, eval_transform, load_image
from multimodal.models.clip import CLIP
from multimodal.pretrained import Checkpoint, build_config

VISION = {"image_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 0}
TEXT = {"embed_dim": 32, "depth": 1, "num_heads": 2}
PREPROCESS = ImagePreprocess(size=(16, 16), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def checkpoint(seed: int = 0, **config: Any) -> Checkpoint:
    """Logits are spread, so that labels differ."""
    torch.manual_seed(seed)
    values = {"embed_dim": 16, "vision": VISION, "text": TEXT, "logit_scale": 3.0}
    model = CLIP(build_config("clip", {**values, **config}))
    for weight in (model.text.token_embed.weight, model.vision.patch_embed.proj.weight):
        torch.nn.init.normal_(weight)
    tokenizer = CLIPTokenizer().to_dict()
    return Checkpoint.of("clip", model, preprocess=PREPROCESS.to_dict(), tokenizer=tokenizer)


def image_features(paths: list[str], source: str = "model.safetensors") -> Tensor:
    """[n, E], of length 1."""
    loaded: Any = pretrained.load(source)
    pixels = torch.stack([eval_transform(PREPROCESS)(load_image(path)) for path in paths])
    with torch.no_grad():
        features: Tensor = loaded.model.encode_image(pixels)
    return features


def text_features(texts: list[str], source: str = "model.safetensors") -> Tensor:
    """[n, E], of length 1; one text at a time."""
    loaded: Any = pretrained.load(source)
    with torch.no_grad():
        return torch.cat([loaded.model.encode_text(CLIPTokenizer()([text])) for text in texts])


def label_features(labels: list[str], templates: list[str]) -> Tensor:
    """[C, E]: means over templates."""
    means = [text_features([one.replace("{}", label) for one in templates]).mean(dim=0) for label in labels]
    return F.normalize(torch.stack(means), dim=-1)
