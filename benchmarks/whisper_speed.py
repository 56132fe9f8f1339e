"""Transcription beside openai-whisper, Hugging Face's Whisper and CTranslate2, which faster-whisper runs, interleaved.

    python benchmarks/whisper_speed.py --weights tiny.en.pt --root utterances [--rounds 7]

All have the same weights. From samples in memory to text: spectrogram, encoder, decoder with timestamps, temperature 0.
Clips of 30 seconds are put together from the recordings of the table in root (columns file, lang, text); by it WER is
counted as well, with Whisper's English normalizer. CTranslate2 is given our spectrogram and decodes one window.
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ctranslate2
import jiwer
import numpy as np
import torch
import whisper
from numpy.typing import NDArray
from report import origin, write_section
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.utils import logging
from whisper.normalizers import EnglishTextNormalizer

from multimodal import pretrained
from multimodal.data.audio import SAMPLE_RATE, LogMel, Sound, load_audio
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.quantize import quantize
from tasks.whisper.decode import Decoder, DecodingOptions
from tasks.whisper.huggingface import write_folder
from tasks.whisper.segments import Transcript
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions

Clip = NDArray[np.float32]
Transcribe = Callable[[Sequence[Clip]], list[str]]
"""Clips of up to 30 seconds to texts, all at a time where it can."""
WINDOW = 30 * SAMPLE_RATE
FILES, BEAMS = 8, 5
OURS = "this suite"


def ours(weights: str, beams: int | None, *, int8: bool = False) -> Transcribe:
    loaded = pretrained.load(weights, task="whisper")
    if int8:
        quantize(loaded.model)  # type: ignore[arg-type]
    options = DecodingOptions(temperatures=(0.0,), beam_size=beams)
    decoder = Decoder(loaded.model, SpeechTokenizer.from_record(loaded.tokenizer), options)  # type: ignore[arg-type]
    transcriber = Transcriber(decoder, LogMel.from_dict(loaded.preprocess or {}), WindowOptions(), batch_size=FILES)

    def run(clips: Sequence[Clip]) -> list[str]:
        sounds = [partial(Sound.of, torch.from_numpy(clip), SAMPLE_RATE) for clip in clips]
        found = dict(transcriber.run(sounds))
        return [one.text if isinstance(one, Transcript) else str(one) for _, one in sorted(found.items())]

    return run


def openai(weights: str, beams: int | None) -> Transcribe:
    model = whisper.load_model(weights, device="cpu")

    def run(clips: Sequence[Clip]) -> list[str]:
        options: dict[str, Any] = {"temperature": 0.0, "beam_size": beams, "fp16": False}
        return [str(model.transcribe(clip, **options)["text"]) for clip in clips]

    return run


def hugging_face(folder: Path, beams: int | None) -> Transcribe:
    logging.set_verbosity_error()
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    extract, tokenizer = WhisperFeatureExtractor.from_pretrained(folder), WhisperTokenizerFast.from_pretrained(folder)

    @torch.inference_mode()
    def run(clips: Sequence[Clip]) -> list[str]:
        features = extract(list(clips), sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
        tokens = model.generate(features, num_beams=beams or 1, do_sample=False, return_timestamps=True)
        found: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return found

    return run


def ctranslate(folder: Path, mel: LogMel, compute_type: str, beams: int | None) -> Transcribe:
    model = ctranslate2.models.Whisper(
        str(folder), device="cpu", compute_type=compute_type, intra_threads=torch.get_num_threads()
    )
    tokenizer = SpeechTokenizer.from_openai(multilingual=False)

    def run(clips: Sequence[Clip]) -> list[str]:
        padded = [np.pad(clip, (0, WINDOW - len(clip))) for clip in clips]
        features = np.stack([mel(torch.from_numpy(clip)).numpy() for clip in padded])
        found = model.generate(
            ctranslate2.StorageView.from_array(features),
            [tokenizer.prompt()] * len(clips),
            beam_size=beams or 1,
            max_initial_timestamp_index=50,
        )
        return [tokenizer.decode(one.sequences_ids[0]) for one in found]

    return run


def read_clips(root: Path) -> tuple[list[Clip], list[str]]:
    """The English recordings, and what they say."""
    with (root / "transcripts.tsv").open(newline="", encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if r["lang"] == "en"]
    return [load_audio(root / row["file"]).numpy() for row in rows], [row["text"] for row in rows]


def thirty_seconds(clips: Sequence[Clip], first: int) -> Clip:
    """Speech without a pause, from that recording on."""
    turned = [*clips[first:], *clips[:first]]
    return np.concatenate(turned)[:WINDOW]


def error_rate(run: Transcribe, clips: Sequence[Clip], texts: Sequence[str]) -> float:
    normalize = EnglishTextNormalizer()
    said = [normalize(run([clip])[0]) for clip in clips]
    return float(jiwer.wer([normalize(text) for text in texts], said))


def timed(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each in interleaved rounds after one warm-up; who goes first is turned."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds):
        turn = index % len(names)
        for name in [*names[turn:], *names[:turn]]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1000 * (time.perf_counter() - start))
    return times


def rows_of(work: str, times: dict[str, list[float]]) -> list[str]:
    """Medians, and those of the others over ours with the range of the rounds."""
    mine = times[OURS]
    rows = []
    for name, theirs in times.items():
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        ratio = statistics.median(theirs) / statistics.median(mine)
        told = "" if name == OURS else f"**{ratio:.2f}** | {min(ratios):.2f}–{max(ratios):.2f}"
        rows.append(f"| {work} | {name} | {statistics.median(theirs):.0f} | {told or '1 | '} |")
    return rows


def one_by_one(run: Transcribe, clips: Sequence[Clip]) -> list[str]:
    return [text for clip in clips for text in run([clip])]


def measure(weights: str, hf: Path, ct2: Path, clips: Sequence[Clip], rounds: int) -> list[str]:
    files = [thirty_seconds(clips, 4 * first) for first in range(FILES)]
    mel = LogMel()
    rows = ["| work | program | ms | over ours | range of rounds |", "|---|---|---|---|---|"]
    for beams, kind in ((None, "greedy"), (BEAMS, f"beam {BEAMS}")):
        programs: dict[str, Transcribe] = {
            OURS: ours(weights, beams),
            f"{OURS}, int8": ours(weights, beams, int8=True),
            "openai-whisper": openai(weights, beams),
            "Hugging Face": hugging_face(hf, beams),
            "CTranslate2, fp32": ctranslate(ct2, mel, "float32", beams),
            "CTranslate2, int8": ctranslate(ct2, mel, "int8", beams),
        }
        one = {name: partial(run, files[:1]) for name, run in programs.items()}
        rows += rows_of(f"30 s, {kind}", timed(one, rounds))
        print(*rows[-len(one) :], sep="\n", flush=True)
        if beams is None:
            eight: dict[str, Callable[[], object]] = {name: partial(run, files) for name, run in programs.items()}
            eight["openai-whisper"] = partial(one_by_one, programs["openai-whisper"], files)
            rows += rows_of(f"{FILES} files of 30 s, {kind}", timed(eight, max(3, rounds // 2)))
            print(*rows[-len(eight) :], sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="tiny.en.pt of OpenAI's")
    parser.add_argument("--root", type=Path, required=True, help="folder of recordings with transcripts.tsv")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    heading = origin("openai-whisper", "transformers", "ctranslate2")
    clips, texts = read_clips(args.root)
    with tempfile.TemporaryDirectory() as place:
        hf, ct2 = Path(place) / "hf", Path(place) / "ct2"
        write_folder(pretrained.read(args.weights, task="whisper"), hf)
        ctranslate2.converters.TransformersConverter(str(hf)).convert(str(ct2))
        rows = measure(args.weights, hf, ct2, clips, args.rounds)
        programs = {
            OURS: ours(args.weights, None),
            f"{OURS}, int8": ours(args.weights, None, int8=True),
            "openai-whisper": openai(args.weights, None),
            "CTranslate2, int8": ctranslate(ct2, LogMel(), "int8", None),
        }
        errors = {name: error_rate(run, clips, texts) for name, run in programs.items()}
    told = ", ".join(f"{name} {100 * error:.1f} %" for name, error in errors.items())
    text = (__doc__ or "").split("\n\n")[2].strip().splitlines()
    closing = f"WER, greedy, over {len(clips)} English recordings: {told}. {torch.get_num_threads()} threads each."
    write_section("Whisper's speed", [heading, "", *text, "", *rows, "", closing])


if __name__ == "__main__":
    main()
