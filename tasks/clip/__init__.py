"""Contrastive image-text training with CLIP."""

from tasks.registry import FORMATS, Format, Link, Task, Verb

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
    verbs=(
        Verb(
            name="zero-shot",
            help="classify images by words, or measure that on a folder of classes",
            module="tasks.clip.zero_shot",
            names_task=False,
        ),
        Verb(name="search", help="rank images by a sentence", module="tasks.clip.search", names_task=False),
        Verb(
            name="probe",
            help="measure classifiers on the frozen features of a folder of classes",
            module="tasks.clip.probe",
            names_task=False,
        ),
    ),
    formats=(
        *FORMATS,
        Format(
            name="open_clip",
            help="a folder for open_clip.create_model('local-dir:OUT')",
            write="multimodal.pretrained.open_clip_folder:to_open_clip",
        ),
        Format(
            name="huggingface",
            help="a folder for CLIPModel.from_pretrained('OUT')",
            write="multimodal.pretrained.hf_clip:to_hf",
        ),
    ),
    benchmark="tasks.clip.bench:workloads",
    peers="tasks.clip.peers:peers",
)
