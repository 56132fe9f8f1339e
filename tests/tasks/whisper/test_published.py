"""The published tiny.en on real recordings, against what openai-whisper wrote of them."""

import csv
from functools import partial
from pathlib import Path

import pytest

from multimodal.data.audio import LogMel, open_sound
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained import load
from tasks.whisper.decode import Decoder, DecodingOptions
from tasks.whisper.segments import Transcript
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions


@pytest.fixture(scope="module")
def weights(shared: Path) -> Path:
    path = shared.resolve().parent / "weights/tiny.en.pt"
    if not path.is_file():
        tool = shared / "tools/published_weights.py"
        pytest.skip(f"needs {path}, which `python {tool} whisper-tiny.en {path.parent}` fetches")
    return path


def test_text_of_every_recording(shared: Path, weights: Path) -> None:
    folder = shared / "data/utterances"
    with (folder / "whisper_reference_outputs.tsv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row["tiny.en"]]
    loaded = load(weights, task="whisper")
    tokenizer = SpeechTokenizer.from_record(loaded.tokenizer)
    decoder = Decoder(loaded.model, tokenizer, DecodingOptions(temperatures=(0.0,)))  # type: ignore[arg-type]
    mel = LogMel.from_dict(loaded.preprocess or {})
    transcriber = Transcriber(decoder, mel, WindowOptions(), batch_size=8)
    found = dict(transcriber.run([partial(open_sound, folder / row["file"]) for row in rows]))
    assert len(rows) == 34
    for index, row in enumerate(rows):
        transcript = found[index]
        assert isinstance(transcript, Transcript)
        assert transcript.text == row["tiny.en"].strip(), row["file"]
        assert all(one.end <= transcript.seconds for one in transcript.segments)
