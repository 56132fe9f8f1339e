"""`multimodal rollout dt`: ask a policy for returns, and see what it achieves."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from multimodal import pretrained
from multimodal.pretrained.files import write_whole
from tasks.dt.draw import draw
from tasks.dt.environment import Environment, Outcome, Result, make, roll_out
from tasks.dt.policy import Policy
from tasks.dt.video import Film
from tasks.errors import UsageError, one_line
from tasks.predict import device_of, positive
from tasks.run import find_run

PICTURE = "rollout.png"
"""In the run's folder, where the checkpoint is a run's and no other place is told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("--checkpoint", required=True, metavar="SOURCE", help=f"the model: {pretrained.FORMATS}")
    parser.add_argument(
        "--target-return",
        type=_finite,
        nargs="+",
        metavar="RETURN",
        help="returns to ask for (default: the highest of a training episode)",
    )
    parser.add_argument("--episodes", type=positive, default=20, metavar="N", help="for each of them (default: 20)")
    parser.add_argument("--environment", metavar="NAME", help="gymnasium's name of it (default: the checkpoint's)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the first episode, others follow (default: 0)"
    )
    parser.add_argument(
        "--num-envs", type=positive, default=16, metavar="N", help="environments that go in step (default: 16)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps, …; auto is an accelerator where there is one")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the results as JSON; without FILE print them so"
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help=f"draw target against achieved return as PNG (default: {PICTURE} in the run that the checkpoint is of)",
    )
    parser.add_argument("--video", metavar="FILE", help="film the first episode for each return as MP4")


def run(args: argparse.Namespace) -> int:
    """Roll out; the exit code."""
    try:
        policy = Policy.load(args.checkpoint, device_of(args.device))
        targets = _targets(policy, args.target_return)
        name = args.environment or _own_environment(policy, args.checkpoint)
        picture = _picture(args.picture, args.checkpoint)
        for flag, place in (("--json", args.json), ("--picture", picture), ("--video", args.video)):
            _check_place(flag, place)
        if args.seed < 0:
            raise ValueError(f"--seed {args.seed}: expected at least 0")
        film = None if args.video is None else Film(name, policy.model.config)
        environments = [
            make(name, policy.model.config) for _ in range(min(args.num_envs, args.episodes * len(targets)))
        ]
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
    results = roll_out_all(policy, environments, targets, args.episodes, args.seed)
    if film is not None:
        film.save(Path(args.video), policy, targets, args.seed)
    if picture is not None:
        draw(Path(picture), results, policy.preprocess.return_range, name)
    report = _report(args, name, policy, results)
    if args.json == "-":
        print(report, end="")
        return 0
    if args.json is not None:
        write_whole(Path(args.json), report.encode())
    print(f"{name}, {args.episodes} episodes for each return\n{_table(policy, results)}")
    for kind, place in (("picture", picture), ("video", args.video)):
        if place is not None:
            print(f"{kind}  {place}")
    return 0


def roll_out_all(
    policy: Policy, environments: Sequence[Environment], targets: Sequence[float | None], episodes: int, seed: int
) -> list[Result]:
    """The episodes for each target, as many at once as there are environments; they begin alike for all targets."""
    wanted = [(target, seed + index) for target in targets for index in range(episodes)]
    outcomes: list[Outcome] = []
    with tqdm(total=len(wanted), unit=" episodes", disable=None) as progress:
        for start in range(0, len(wanted), len(environments)):
            chunk = wanted[start : start + len(environments)]
            asked = [target for target, _ in chunk if target is not None]
            seeds = [number for _, number in chunk]
            outcomes += roll_out(policy, environments[: len(chunk)], asked or None, seeds)
            progress.update(len(chunk))
    return [Result(target, outcomes[at * episodes : (at + 1) * episodes]) for at, target in enumerate(targets)]


def _targets(policy: Policy, given: list[float] | None) -> list[float] | list[None]:
    low, high = policy.preprocess.return_range
    if not policy.model.config.returns:
        if given is not None:
            raise ValueError("--target-return: this model clones behaviour (model.returns false), which takes none")
        return [None]
    for target in given or ():
        if not low <= target <= high:
            side, bound = (
                ("above", f"highest return {high:g}") if target > high else ("below", f"lowest return {low:g}")
            )
            print(
                f"multimodal: warning: --target-return {target:g} is {side} the {bound} of what the model learned from",
                file=sys.stderr,
            )
    return given or [high]


def _own_environment(policy: Policy, checkpoint: str) -> str:
    name = policy.preprocess.environment
    if name is None:
        raise ValueError(f"{checkpoint}: does not say which environment it is for, expected --environment NAME")
    if ":" in name:  # gymnasium would import what stands before it
        raise ValueError(f"{checkpoint}: its environment {name!r} names a module to import; to allow it, --environment")
    return name


def _picture(given: str | None, checkpoint: str) -> str | None:
    run = find_run(checkpoint)
    return given or (None if run is None else str(run / PICTURE))


def _check_place(flag: str, place: str | None) -> None:
    """Told before anything is rolled out."""
    if place in (None, "-"):
        return
    path = Path(str(place))
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {place}: no such folder, expected a file in one that there is")
    if path.is_dir():
        raise ValueError(f"{flag} {place}: a folder, expected a file")
    suffix = {"--picture": ".png", "--video": ".mp4"}.get(flag)
    if suffix and path.suffix != suffix:
        raise ValueError(f"{flag} {place}: the name ends in {path.suffix or 'nothing'!r}, expected {suffix}")


def _report(args: argparse.Namespace, name: str, policy: Policy, results: Sequence[Result]) -> str:
    rows: list[dict[str, Any]] = []
    for result in results:
        mean = float(result.returns.mean())
        rows.append(
            {
                "target_return": result.target,
                "mean": mean,
                "std": float(result.returns.std()),
                "normalized_score": policy.preprocess.normalized_score(mean),
                "returns": result.returns.tolist(),
                "lengths": [one.length for one in result.outcomes],
                "cut": sum(one.cut for one in result.outcomes),
            }
        )
    data = {"checkpoint": args.checkpoint, "environment": name, "episodes": args.episodes, "seed": args.seed}
    return json.dumps({**data, "results": rows}, indent=2) + "\n"


def _table(policy: Policy, results: Sequence[Result]) -> str:
    lines = [f"{'target':>10}  {'achieved':>18}  {'score':>7}  {'steps':>7}"]
    for result in results:
        mean = float(result.returns.mean())
        score = policy.preprocess.normalized_score(mean)
        cut = sum(one.cut for one in result.outcomes)
        lines.append(
            f"{'–' if result.target is None else format(result.target, '.1f'):>10}  "
            f"{f'{mean:.1f} ± {result.returns.std():.1f}':>18}  "
            f"{'n/a' if score is None else format(score, '.1f'):>7}  "
            f"{np.mean([one.length for one in result.outcomes]):>7.1f}"
            + (f"  ({cut} stopped after {policy.preprocess.max_episode_length} steps)" if cut else "")
        )
    return "\n".join(lines)


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
