"""Object detection with DETR."""

from tasks.registry import FORMATS, Format, Link, Task, Verb

TASK = Task(
    name="detr",
    help="find objects in images with DETR",
    module="tasks.detr.task:DETRModule",
    data="tasks.detr.data:DetectionData",
    config="detr.yaml",
    metric="AP",
    mode="max",
    example="tasks.detr.example:example",
    links=(Link(source="data.num_classes", target="model.num_classes", on="instantiate"),),
    verbs=(Verb(name="predict", help="find objects in images, and draw them", module="tasks.detr.predict"),),
    formats=(
        *FORMATS,
        Format(
            name="huggingface",
            help="a folder for DetrForObjectDetection.from_pretrained('OUT')",
            write="multimodal.pretrained.hf_detr:to_hf",
        ),
        Format(
            name="facebook",
            help="weights for facebookresearch/detr, without labels",
            write="multimodal.pretrained.fb_detr:to_facebook",
            suffix=".pth",
        ),
    ),
    extra="detection",
    benchmark="tasks.detr.bench:workloads",
    peers="tasks.detr.peers:peers",
)
