"""A CLIP with all that it needs to embed images and texts.

B images, C labels, E embed_dim of the joint space
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from multimodal import pretrained
from multimodal.data import CLIPTokenizer, ImagePreprocess, tokenizer_from
from multimodal.models.clip import CLIP, MAX_LOGIT_SCALE
from tasks.clip.cache import Cache, tensor_bytes

Space = Literal["joint", "image"]
"""What an image's features are: those that are compared with texts', or the image tower's, before the projection."""

TEXT_BATCH = 256
"""Texts at a time."""


@dataclass
class Embedder:
    """A model in evaluation mode, what belongs to it, and where embeddings are kept."""

    model: CLIP
    preprocess: ImagePreprocess
    tokenizer: CLIPTokenizer
    device: torch.device
    cache: Cache

    @classmethod
    def load(cls, source: str, device: torch.device, cache: Cache) -> "Embedder":
        """From a checkpoint; ValueError where it does not say how its images or texts were prepared."""
        loaded = pretrained.load(source, task="clip")
        if loaded.preprocess is None:
            raise ValueError(f"{source}: lacks how its images were preprocessed, which is needed to embed others")
        preprocess = ImagePreprocess.from_dict(loaded.preprocess)
        tokenizer = tokenizer_from(loaded.tokenizer, source)
        return cls(loaded.model.to(device), preprocess, tokenizer, device, cache)  # type: ignore[arg-type]

    @cached_property
    def fingerprint(self) -> str:
        """Of the weights, and of all else that an embedding depends on: equal for equal models, wherever they lie."""
        described = [self.model.config, self.preprocess, self.tokenizer.to_dict()]
        digest = hashlib.sha256(json.dumps(list(map(str, described))).encode())
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
            digest.update(tensor_bytes(weight))
        return digest.hexdigest()

    @torch.inference_mode()
    def images(self, pixels: Tensor, space: Space = "joint") -> Tensor:
        """Images [B, channels, H, W] to features float32 [B, E] of length 1, or [B, D] of the image tower."""
        pixels = pixels.to(self.device)
        features = self.model.encode_image(pixels) if space == "joint" else self.model.vision(pixels)
        return features.float().cpu()

    @torch.inference_mode()
    def labels(self, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
        """Features float32 [C, E] of length 1, each the mean of those of a label in all templates (section 3.1.4).

        Args:
            labels: names.
            templates: texts with {} in place of the name, at least one.
        """
        key = ("labels", self.fingerprint, list(labels), list(templates))
        if (kept := self.cache.read(*key)) is not None:
            return kept.embeddings
        means = self.means(labels, templates)
        self.cache.write(means, None, *key)
        return means

    @torch.inference_mode()
    def means(self, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
        """What `labels` returns, computed anew."""
        texts = [template.replace("{}", label) for label in labels for template in templates]
        return F.normalize(self._sums(texts, len(templates)), dim=-1)

    def _sums(self, texts: Sequence[str], group: int) -> Tensor:
        """The sums of the features of so many neighbouring texts each; of all texts only the sums are held."""
        # Texts of like length together: a batch is cut at its longest. A token is at least one byte.
        order = sorted(range(len(texts)), key=lambda at: _bytes(texts[at]))
        sums = torch.zeros(len(texts) // group, self.model.config.embed_dim)
        quiet = None if len(texts) > TEXT_BATCH else True
        with tqdm(total=len(texts), unit=" texts", disable=quiet, leave=False) as progress:
            for start in range(0, len(texts), TEXT_BATCH):
                batch = order[start : start + TEXT_BATCH]
                tokens = self.tokenizer([texts[at] for at in batch]).to(self.device)
                sums.index_add_(0, torch.tensor(batch) // group, self.model.encode_text(tokens).float().cpu())
                progress.update(len(batch))
        return sums

    @torch.inference_mode()
    def probabilities(self, images: Tensor, labels: Tensor) -> Tensor:
        """Of images [B, E] to show labels [C, E]: [B, C].

        Rows sum to 1, but with a logit bias (SigLIP) each label is judged by itself.
        """
        scale = self.model.logit_scale.clamp(0, MAX_LOGIT_SCALE).exp().float().cpu()
        logits = scale * images @ labels.T
        if self.model.logit_bias is None:
            return logits.softmax(dim=-1)
        return (logits + self.model.logit_bias.float().cpu()).sigmoid()

    def cut_short(self, labels: Sequence[str], templates: Sequence[str]) -> list[str]:
        """The labels that have more tokens, in some template, than the model reads."""
        length = self.tokenizer.context_length
        longer = CLIPTokenizer(length + 1)

        def is_cut(text: str) -> bool:
            return _bytes(text) > length - 2 and longer([text]).shape[1] > length

        return [label for label in labels if any(is_cut(one.replace("{}", label)) for one in templates)]


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))
