"""Image classification with a Vision Transformer."""

from tasks.registry import FORMATS, Format, Link, Task, Verb

TASK = Task(
    name="vit",
    help="classify images with a Vision Transformer",
    module="tasks.vit.task:ViTModule",
    data="tasks.vit.data:ImageData",
    config="vit.yaml",
    metric="accuracy",
    mode="max",
    example="tasks.vit.example:example",
    links=(
        Link(source="model.image_size", target="data.image_size"),
        Link(source="model.in_channels", target="data.channels"),
        Link(source="data.num_classes", target="model.num_classes", on="instantiate"),
    ),
    verbs=(Verb(name="predict", help="name what images show", module="tasks.vit.predict"),),
    formats=(
        *FORMATS,
        Format(
            name="timm",
            help="a folder for timm.create_model('local-dir:OUT', pretrained=True)",
            write="multimodal.pretrained.timm_folder:write_folder",
        ),
        Format(
            name="huggingface",
            help="a folder for ViTForImageClassification.from_pretrained('OUT')",
            write="multimodal.pretrained.hf_vit:to_hf",
        ),
    ),
    benchmark="tasks.vit.bench:workloads",
    peers="tasks.vit.peers:peers",
)
