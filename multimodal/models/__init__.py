"""The models: each short, built only from blocks."""

from importlib import import_module

from torch import nn

MODELS = {
    "clip": ("multimodal.models.clip", "CLIP", "CLIPConfig"),
    "detr": ("multimodal.models.detr", "DETR", "DETRConfig"),
    "dt": ("multimodal.models.decision_transformer", "DecisionTransformer", "DecisionTransformerConfig"),
    "vit": ("multimodal.models.vit", "ViT", "ViTConfig"),
    "whisper": ("multimodal.models.whisper", "Whisper", "WhisperConfig"),
}
"""Task -> module, model class, config class. A model is built by `Model(Config(...))`."""


def model_classes(task: str) -> tuple[type[nn.Module], type]:
    """The model and config classes of a task, imported now; ValueError where there is no such task."""
    if task not in MODELS:
        raise ValueError(f"no model for task {task!r}, expected one of: {', '.join(sorted(MODELS))}")
    module, model, config = MODELS[task]
    return getattr(import_module(module), model), getattr(import_module(module), config)
