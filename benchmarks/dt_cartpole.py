"""Returns that `multimodal fit dt`, the default recipe on CartPole, achieves when it is asked for 500, 250 and 100.

    python benchmarks/dt_cartpole.py [--seeds 0 1 2] [--no-cloning]

Behaviour cloning by the same stack, of all episodes and of the best tenth, stands beside. The picture of the first run
becomes docs/dt_cartpole.png.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from fit import train
from report import DOCS, origin, write_section
from rollouts import CLONES, Returns, roll_out

TARGETS = (500, 250, 100)
WANTED = {500: (480, 500), 250: (200, 300), 100: (80, 130)}
"""Least and most that the mean is to be."""


def row(name: str, run: Path, found: Returns, wall: float) -> str:
    cells = [f"{mean:.0f} ± {std:.0f}" for mean, std in zip(found.means, found.deviations, strict=True)]
    summary = json.loads((run / "summary.json").read_text())
    seconds, params = summary["seconds"], summary["params"]
    return f"| {name} | {' | '.join(cells)} | {summary['value']:.0f} | {params:,} | {seconds:.0f} | {wall:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-cloning", action="store_true", help="leave out behaviour cloning")
    args = parser.parse_args()
    heading = origin("pytorch-lightning", "gymnasium")
    columns = ("run", *(f"asked for {target}" for target in TARGETS), "summary.json", "parameters")
    rows = [f"| {' | '.join(columns)} | training, s | whole command, s |", f"|{'---|' * (len(columns) + 2)}"]
    within = []
    for number, seed in enumerate(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("dt", Path(folder), {"seed_everything": str(seed)})
            found = roll_out(run, TARGETS)
            rows.append(row(f"the recipe, seed {seed}", run, found, wall))
            if number == 0:
                shutil.copy(run / "rollout.png", DOCS / "dt_cartpole.png")
        within += [low <= mean <= high for mean, (low, high) in zip(found.means, WANTED.values(), strict=True)]
        print(rows[-1], flush=True)
    for name, flags in {} if args.no_cloning else CLONES.items():
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("dt", Path(folder), {"seed_everything": str(args.seeds[0]), **flags})
            found = roll_out(run, ())
            same = Returns(found.means * len(TARGETS), found.deviations * len(TARGETS), [])
            rows.append(row(name, run, same, wall))
        print(rows[-1], flush=True)
    closing = (
        f"Means ± deviations of 20 episodes. Within {', '.join(f'{a}–{b}' for a, b in WANTED.values())}: "
        f"{sum(within)} of {len(within)}."
    )
    picture = ["![returns asked for and achieved](dt_cartpole.png)"]
    write_section("Decision Transformer on CartPole", [heading, "", *rows, "", closing, "", *picture])


if __name__ == "__main__":
    main()
