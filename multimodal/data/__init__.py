"""Decoding, preprocessing and augmentation, each without a framework; embedded data sets."""

from multimodal.data.augment import Augmentation, train_transform
from multimodal.data.detection import DetectionPreprocess, detection_transform
from multimodal.data.image import (
    ImagePreprocess,
    eval_transform,
    list_images,
    load_image,
    natural_key,
)
from multimodal.data.seeding import seed_all, seeded
from multimodal.data.text import CLIPTokenizer, tokenizer_from

__all__ = [
    "Augmentation",
    "CLIPTokenizer",
    "DetectionPreprocess",
    "ImagePreprocess",
    "detection_transform",
    "eval_transform",
    "list_images",
    "load_image",
    "natural_key",
    "seed_all",
    "seeded",
    "tokenizer_from",
    "train_transform",
]
