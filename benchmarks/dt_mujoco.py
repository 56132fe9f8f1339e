"""Target and achieved return of Decision Transformers on recorded episodes of MuJoCo, beside behaviour cloning.

    python benchmarks/dt_mujoco.py --root FOLDER [--name hopper] [--seeds 0]

FOLDER holds hopper-expert.npz and hopper-medium.npz, or those of halfcheetah. Seven targets lie evenly between the 5th
and the 95th percentile of the returns in the data; each is asked for in twenty episodes.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from fit import train
from report import DOCS, origin, write_section
from rollouts import CLONES, roll_out
from scipy.stats import spearmanr

from tasks.dt import d4rl

TITLES = {"hopper": "Hopper", "halfcheetah": "HalfCheetah"}


def targets_of(root: str, name: str) -> list[float]:
    """Seven returns between the percentiles."""
    episodes = d4rl.read(root, [f"{name}-{kind}.npz" for kind in ("expert", "medium")]).episodes
    low, high = np.percentile([one.total for one in episodes], [5, 95])
    return [round(float(value), 1) for value in np.linspace(low, high, 7)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--name", choices=TITLES, default="hopper")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    heading = origin("pytorch-lightning", "gymnasium", "mujoco")
    targets = targets_of(args.root, args.name)
    head = [*(f"{target:.0f}" for target in targets), "Spearman of the means", "of the episodes", "whole command, s"]
    rows = [f"| asked for | {' | '.join(head)} |", f"|{'---|' * (len(head) + 1)}"]
    recipe = f"dt_{args.name}.yaml"
    for number, seed in enumerate(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("dt", Path(folder), {"data.root": args.root, "seed_everything": str(seed)}, recipe=recipe)
            found = roll_out(run, targets)
            if number == 0:
                shutil.copy(run / "rollout.png", DOCS / f"dt_{args.name}.png")
        by_means = spearmanr(targets, found.means).statistic
        asked = np.repeat(targets, [len(episodes) for episodes in found.episodes])
        by_episodes = spearmanr(asked, np.concatenate(found.episodes)).statistic
        cells = [f"{mean:.0f} ± {std:.0f}" for mean, std in zip(found.means, found.deviations, strict=True)]
        rows.append(f"| seed {seed} | {' | '.join(cells)} | **{by_means:.2f}** | {by_episodes:.2f} | {wall:.0f} |")
        print(rows[-1], flush=True)
    for name, flags in CLONES.items():
        with tempfile.TemporaryDirectory() as folder:
            run, wall = train("dt", Path(folder), {"data.root": args.root, **flags}, recipe=recipe)
            found = roll_out(run, ())
        rows.append(f"| {name} | {found.means[0]:.0f} ± {found.deviations[0]:.0f} |{' |' * 8} {wall:.0f} |")
        print(rows[-1], flush=True)
    picture = [f"![returns asked for and achieved](dt_{args.name}.png)"]
    closing = "Means ± deviations of 20 episodes. Behaviour cloning takes no target: it has one return."
    write_section(f"Decision Transformer on {TITLES[args.name]}", [heading, "", *rows, "", closing, "", *picture])


if __name__ == "__main__":
    main()
