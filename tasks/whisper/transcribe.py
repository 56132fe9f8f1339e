"""`multimodal transcribe AUDIO...`: what recordings say, as text or subtitles."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

from tqdm import tqdm

from multimodal import pretrained
from multimodal.data.audio import SAMPLE_RATE, LogMel, list_audio, open_sound
from multimodal.data.speech_text import SpeechTokenizer
from multimodal.pretrained.files import write_whole
from multimodal.quantize import HOLDS_FOR, quantize
from tasks.errors import UsageError
from tasks.predict import device_of, positive
from tasks.whisper.decode import TEMPERATURES, Decoder, DecodingOptions
from tasks.whisper.segments import Transcript
from tasks.whisper.speech import SpeechFinder
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions
from tasks.whisper.writers import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("paths", nargs="+", metavar="AUDIO", help="recordings, and folders of recordings")
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help=f"the model: {pretrained.FORMATS}")
    parser.add_argument("--language", default="auto", metavar="CODE", help="en, de, zh, …; auto (default): by ear")
    parser.add_argument(
        "--task", dest="to", choices=("transcribe", "translate"), default="transcribe", help="translate is into English"
    )
    parser.add_argument(
        "--format",
        dest="formats",
        type=_formats,
        default=["txt"],
        metavar="FORMAT[,FORMAT…]",
        help=f"{', '.join(FORMATS)} (default: txt)",
    )
    parser.add_argument("--output-dir", type=Path, metavar="D", help="where files go; without it: standard output")
    parser.add_argument("--word-timestamps", action="store_true", help="find when each word is said; json has them")
    parser.add_argument("--beam-size", type=positive, metavar="N", help="beam search (default: none)")
    parser.add_argument("--best-of", type=positive, default=5, metavar="N", help="texts drawn at temperatures above 0")
    parser.add_argument(
        "--temperature",
        type=_at_least_zero,
        nargs="+",
        default=list(TEMPERATURES),
        metavar="T",
        help=f"tried in this order until a text is good (default: {' '.join(map(str, TEMPERATURES))})",
    )
    parser.add_argument("--initial-prompt", metavar="TEXT", help="names and words that are to be expected")
    parser.add_argument("--no-previous-text", action="store_true", help="decode each window for itself")
    parser.add_argument("--vad", action="store_true", help="skip what is no speech, by silero-vad")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="recordings at a time (default: 8)")
    parser.add_argument("--int8", action="store_true", help=f"faster, less exact products; for {HOLDS_FOR}")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, …; auto is an accelerator where there is one")


def run(args: argparse.Namespace) -> int:
    """Transcribe; the exit code is 1 where a recording could not be read."""
    paths = _recordings(args.paths)
    targets = _targets(paths, args.formats, args.output_dir)
    transcriber = _transcriber(args)
    if args.output_dir is not None:
        _make_folder(args.output_dir)
    failed = False
    done: dict[int, Transcript | None] = {}
    due = 0
    with tqdm(unit=" s", total=0, unit_scale=True, disable=None) as bar:

        def progress(seconds: float, found: float) -> None:
            bar.total += round(found)
            bar.update(round(seconds, 2))

        sounds = [partial(open_sound, path, transcriber.mel.sample_rate) for path in paths]
        for index, result in transcriber.run(sounds, progress):
            said, target = None, targets[index]
            if isinstance(result, ValueError):
                failed = True
                told = str(result) if paths[index] in str(result) else f"{paths[index]}: {result}"
                bar.write(f"multimodal: error: {told}", file=sys.stderr)
            elif target is None:
                said = result
            else:  # at once, so that no end of the others takes it away
                _write_files(result, target, args.formats)
            done[index] = said
            while due in done:  # in the order in which they are given
                if (said := done.pop(due)) is not None:
                    heading = f"{said.name}\n" if len(paths) > 1 else ""
                    bar.write(heading + FORMATS[args.formats[0]](said), file=sys.stdout, end="")
                due += 1
    return int(failed)


def _make_folder(folder: Path) -> None:
    """UsageError where nothing can be written to it: told before hours of work are."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"--output-dir {folder}: {error.strerror}, expected a folder that takes files") from error


def _transcriber(args: argparse.Namespace) -> Transcriber:
    loaded = pretrained.load(args.checkpoint, task="whisper")
    if loaded.tokenizer is None:
        raise ValueError(f"--checkpoint {args.checkpoint}: has no tokenizer, expected a tokenizer.json beside it")
    try:
        tokenizer = SpeechTokenizer.from_record(loaded.tokenizer)
        mel = LogMel.from_dict(loaded.preprocess or {"num_mels": loaded.config["num_mels"]})
        options = DecodingOptions(
            translate=args.to == "translate",
            beam_size=args.beam_size,
            best_of=args.best_of,
            temperatures=tuple(args.temperature),
        )
        decoder = Decoder(loaded.model.to(device_of(args.device)), tokenizer, options)  # type: ignore[arg-type]
        if args.vad and mel.sample_rate != SAMPLE_RATE:
            raise ValueError(f"hears {mel.sample_rate} samples a second, expected {SAMPLE_RATE} for --vad")
    except ValueError as error:
        raise ValueError(f"--checkpoint {args.checkpoint}: {error}") from error
    if args.int8:
        try:
            quantize(decoder.model)
        except ValueError as error:
            raise UsageError(f"--{error}") from error
    windows = WindowOptions(
        use_previous=not args.no_previous_text, initial_prompt=args.initial_prompt, words=args.word_timestamps
    )
    return Transcriber(
        decoder,
        mel,
        windows,
        language=None if args.language == "auto" else args.language,
        batch_size=args.batch_size,
        clips=SpeechFinder() if args.vad else None,
    )


def _recordings(given: Sequence[str]) -> list[str]:
    """The files that are given and those of the folders, each once; ValueError for a folder without any."""
    return list(dict.fromkeys(path for place in given for path in _listed(place)))


def _listed(place: str) -> list[str]:
    if not os.path.isdir(place):
        return [place]
    found = list_audio(place)
    if not found:
        raise ValueError(f"{place}: no recording in this folder")
    return list(map(str, found))


def _targets(paths: Sequence[str], formats: Sequence[str], folder: Path | None) -> list[Path | None]:
    """The file of each recording, but for its ending; UsageError where two would be one."""
    if folder is None:
        if len(formats) > 1 or (len(paths) > 1 and formats != ["txt"]):
            raise UsageError("--output-dir is missing, expected where to write several files")
        return [None] * len(paths)
    stems = [Path(path).stem for path in paths]
    names = [Path(path).name if stems.count(stem) > 1 else stem for path, stem in zip(paths, stems, strict=True)]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise UsageError(f"--output-dir {folder}: {path} is not the only recording named {name}")
    return [folder / name for name in names]


def _write_files(transcript: Transcript, target: Path, formats: Sequence[str]) -> None:
    for name in formats:
        write_whole(target.with_name(f"{target.name}.{name}"), FORMATS[name](transcript).encode())


def _formats(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(FORMATS)}")
    return names


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
