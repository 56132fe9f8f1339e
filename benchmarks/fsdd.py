"""Spoken digits from scratch by configs/whisper_digits.yaml: WER on held-out recordings, and on a left-out speaker.

python benchmarks/fsdd.py --root FOLDER [--speakers theo] [--seed 0]
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import origin, write_section

from tasks.run import read_metrics

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "whisper_digits.yaml"


def measure(name: str, root: str, seed: int, flags: list[str]) -> str:
    """Train and test; a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tasks.cli", "fit", "whisper", "--config", str(CONFIG), "--data.root", root]
        command += ["--seed_everything", str(seed), "--trainer.default_root_dir", folder, *flags]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - start
        (run,) = (Path(folder) / "whisper").iterdir()
        found = [row for row in read_metrics(run) if "test/wer" in row][-1]
        seconds = json.loads((run / "summary.json").read_text())["seconds"]
    return (
        f"| {name} | {100 * found['test/wer']:.1f} % | {100 * found['test/cer']:.1f} % | {seconds:.0f} | {wall:.0f} |"
    )


def speakers(root: str) -> list[str]:
    """All that the table names."""
    (table,) = Path(root).glob("*.tsv")
    with table.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return sorted({row["speaker"] for row in rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with the recordings and their table")
    parser.add_argument("--speakers", nargs="+", help="who is left out, one run each (default: the last by name)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    heading = origin("pytorch-lightning", "jiwer")
    runs = [("held-out recordings, a tenth of all", [])]
    for speaker in args.speakers or speakers(args.root)[-1:]:
        runs.append((f"left-out speaker {speaker}", ["--data.table.test", f"speaker={speaker}"]))
    rows = ["| tested on | WER | CER | training, s | whole command, s |", f"|{'---|' * 5}"]
    for name, flags in runs:
        rows.append(measure(name, args.root, args.seed, flags))
        print(rows[-1], flush=True)
    write_section("Whisper on spoken digits", [heading, "", *rows])


if __name__ == "__main__":
    main()
