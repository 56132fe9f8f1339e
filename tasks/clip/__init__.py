"""Contrastive image-text training with CLIP."""

from tasks.registry import Link, Task

TASK = Task(
    name="clip",
    help="learn which texts belong to which images, with CLIP",
    module="tasks.clip.task:CLIPModule",
    data="tasks.clip.data:CaptionData",
    config="clip.yaml",
    metric="top1",
    mode="max",
    example="tasks.clip.example:example",
    links=(
        Link(source="model.vision.image_size", target="data.image_size"),
        Link(source="model.text.context_length", target="data.context_length"),
    ),
)
