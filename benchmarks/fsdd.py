"""Spoken digits from scratch by configs/whisper_digits.yaml: WER on held-out recordings, and on a left-out speaker.

python benchmarks/fsdd.py --root FOLDER [--speakers theo] [--seed 0]
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path

from fit import train
from report import origin, write_section

from tasks.run import read_metrics


def measure(name: str, root: str, seed: int, flags: dict[str, str]) -> str:
    """Train and test; a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        told = {"data.root": root, "seed_everything": str(seed), **flags}
        run, wall = train("whisper", Path(folder), told, recipe="whisper_digits.yaml")
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
    runs: list[tuple[str, dict[str, str]]] = [("held-out recordings, a tenth of all", {})]
    for speaker in args.speakers or speakers(args.root)[-1:]:
        runs.append((f"left-out speaker {speaker}", {"data.table.test": f"speaker={speaker}"}))
    rows = ["| tested on | WER | CER | training, s | whole command, s |", f"|{'---|' * 5}"]
    for name, flags in runs:
        rows.append(measure(name, args.root, args.seed, flags))
        print(rows[-1], flush=True)
    write_section("Whisper on spoken digits", [heading, "", *rows])


if __name__ == "__main__":
    main()
