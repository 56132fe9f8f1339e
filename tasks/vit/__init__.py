"""Image classification with a Vision Transformer."""

from tasks.registry import Link, Task, Verb

TASK = Task(
    name="vit",
    help="classify images with a Vision Transformer",
    module="tasks.vit.task:ViTModule",
    data="tasks.vit.data:ImageData",
    config="vit.yaml",
    metric="accuracy",
    mode="max",
    links=(
        Link(source="model.image_size", target="data.image_size"),
        Link(source="model.in_channels", target="data.channels"),
        Link(source="data.num_classes", target="model.num_classes", on="instantiate"),
    ),
    verbs=(Verb(name="predict", help="name what images show", module="tasks.vit.predict"),),
)
