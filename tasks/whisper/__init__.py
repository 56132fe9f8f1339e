"""Speech recognition with Whisper."""

from tasks.registry import FORMATS, Format, Link, Task, Verb

TASK = Task(
    name="whisper",
    help="write down what recordings say, with Whisper",
    module="tasks.whisper.task:WhisperModule",
    data="tasks.whisper.data:SpeechData",
    config="whisper.yaml",
    metric="cer",
    mode="min",
    example="tasks.whisper.example:example",
    links=(
        Link(source="model.num_mels", target="data.num_mels"),
        Link(source="model.audio_context", target="data.audio_context"),
        Link(source="model.text_context", target="data.text_context"),
        Link(source="model.stem_stride", target="data.stem_stride"),
        Link(source="model.mask_padding", target="data.mask_padding"),
        Link(source="data.vocab_size", target="model.vocab_size", on="instantiate"),
    ),
    verbs=(
        Verb(
            name="transcribe",
            help="write recordings down, as text or subtitles",
            module="tasks.whisper.transcribe",
            names_task=False,
        ),
    ),
    formats=(
        *FORMATS,
        Format(
            name="openai",
            help="a file for whisper.load_model('OUT')",
            write="multimodal.pretrained.openai_whisper:to_openai",
            suffix=".pt",
        ),
        Format(
            name="huggingface",
            help="a folder for WhisperForConditionalGeneration.from_pretrained('OUT')",
            write="tasks.whisper.huggingface:write_folder",
        ),
    ),
    extra="audio",
    benchmark="tasks.whisper.bench:workloads",
    peers="tasks.whisper.peers:peers",
)
