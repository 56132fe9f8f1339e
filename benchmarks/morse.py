"""CER of `multimodal fit whisper`, the default recipe on Morse code, over the whole test set and against the noise.

    python benchmarks/morse.py [--seeds 0]

Against the noise it is measured once more, message by message, as `multimodal transcribe` writes them down; that
picture, of the first run, becomes docs/whisper_morse.png, its curves docs/whisper_curves.png.
"""

import argparse
import json
import shutil
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import jiwer
import matplotlib

matplotlib.use("Agg")
import numpy as np
from fit import train
from matplotlib import pyplot as plt
from report import DOCS, origin, write_section

from multimodal import pretrained
from multimodal.data.audio import LogMel, Sound
from multimodal.data.morse import SNRS, Message
from multimodal.data.speech_text import SpeechTokenizer
from tasks.run import read_metrics
from tasks.whisper.decode import Decoder, DecodingOptions
from tasks.whisper.samples import Morse
from tasks.whisper.segments import Transcript
from tasks.whisper.transcriber import Transcriber
from tasks.whisper.windows import WindowOptions

BINS = np.linspace(*SNRS, 11)


def row(name: str, run: Path, wall: float) -> str:
    measured = [line for line in read_metrics(run) if "test/cer" in line][-1]
    summary = json.loads((run / "summary.json").read_text())
    return (
        f"| {name} | {measured['test/cer']:.4f} | {measured['test/wer']:.4f} | {summary['params']:,} "
        f"| {summary['seconds']:.0f} | {wall:.0f} |"
    )


def written(run: Path, messages: list[Message]) -> list[str]:
    """What is transcribed of each message."""
    loaded = pretrained.load(run, task="whisper")
    mel = LogMel.from_dict(loaded.preprocess or {})
    options = DecodingOptions(temperatures=(0.0,))
    decoder = Decoder(loaded.model, SpeechTokenizer.from_record(loaded.tokenizer), options)  # type: ignore[arg-type]
    sounds = [partial(Sound.of, one.sound(8000), 8000, to=mel.sample_rate) for one in messages]
    texts = {}
    for index, found in Transcriber(decoder, mel, WindowOptions()).run(sounds):
        if not isinstance(found, Transcript):
            raise found
        texts[index] = found.text.strip()
    return [texts[index] for index in range(len(messages))]


def draw(messages: list[Message], texts: list[str], place: Path) -> float:
    """CER against the noise; returns that over all."""
    snrs = np.array([one.snr for one in messages])
    centres, rates = (BINS[:-1] + BINS[1:]) / 2, []
    for low, high in pairwise(BINS):
        chosen = np.flatnonzero((low <= snrs) & (snrs < high))
        rates.append(jiwer.cer([messages[at].text for at in chosen], [texts[at] for at in chosen]))
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    axes.bar(centres, 100 * np.array(rates), width=0.9 * (BINS[1] - BINS[0]))
    axes.set(xlabel="signal to noise, dB in 2 kHz", ylabel="character error rate, %")
    figure.savefig(place, dpi=110)
    return float(jiwer.cer([one.text for one in messages], texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    heading = origin("pytorch-lightning", "jiwer")
    rows = ["| run | test CER | test WER | parameters | training, s | whole command, s |", f"|{'---|' * 6}"]
    messages = Morse("test", 0).messages
    transcribed = 0.0
    for number, seed in enumerate(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("whisper", Path(folder), {"seed_everything": str(seed)})
            rows.append(row(f"the recipe, seed {seed}", run, wall))
            if number == 0:
                shutil.copy(run / "curves.png", DOCS / "whisper_curves.png")
                transcribed = draw(messages, written(run, messages), DOCS / "whisper_morse.png")
        print(rows[-1], flush=True)
    closing = [
        f"On the {len(messages)} messages of the test set, of words that training never has; by the checkpoint that is",
        f"best on val. `multimodal transcribe`, on the same messages at 8 kHz: CER {transcribed:.4f}.",
    ]
    pictures = ["![character error rate against noise](whisper_morse.png)", "", "![curves](whisper_curves.png)"]
    write_section("Whisper on Morse code", [heading, "", *rows, "", *closing, "", *pictures])


if __name__ == "__main__":
    main()
