"""`multimodal rollout dt`: returns asked for and achieved, as a table, JSON, a picture and a film."""

import json
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from PIL import Image

from multimodal import pretrained
from multimodal.models.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from multimodal.pretrained import Checkpoint
from tasks.dt.environment import make, roll_out
from tasks.dt.policy import Policy
from tests.tasks.commands import PLAIN, Run

CONFIG: dict[str, Any] = {
    "state_shape": (4,),
    "action_dim": 2,
    "discrete": True,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "context_length": 4,
    "max_episode_length": 500,
}
SCALES: dict[str, Any] = {
    "state_mean": [0.0] * 4,
    "state_std": [1.0] * 4,
    "action_low": None,
    "action_high": None,
    "return_scale": 500.0,
    "return_range": [10.0, 500.0],
    "max_episode_length": 500,
    "environment": "CartPole-v1",
}


def save(place: Path, scales: dict[str, Any] | None = None, **options: Any) -> Path:
    """A random model, as a checkpoint."""
    torch.manual_seed(0)
    model = DecisionTransformer(DecisionTransformerConfig(**(CONFIG | options)))
    pretrained.save(place, Checkpoint.of("dt", model, preprocess=SCALES | (scales or {})))
    return place


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tmp_path / "model.safetensors")


class Stair(gymnasium.Env[np.ndarray, int]):
    """Ends, by its own rules or by time, after as many steps as its seed says; each is worth 2."""

    observation_space = Box(-1, 1, (4,))
    action_space = Discrete(2, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.length = 0, seed or 0
        return np.zeros(4, dtype=np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.steps += 1
        over = self.steps >= self.length
        return np.full(4, self.steps / 99, dtype=np.float32), 2.0, over and self.length % 2 == 1, over, {}


def test_each_episode_ends_where_its_environment_ends_it(checkpoint: Path) -> None:
    policy = Policy.load(checkpoint)
    lengths = [7, 2, 9, 1, 4]
    environments = [Stair() for _ in lengths]
    seen: list[int] = []
    found = roll_out(policy, environments, [3.0] * 5, lengths, watch=lambda one: seen.append(one.steps))
    assert [one.length for one in found] == lengths
    assert [one.total for one in found] == [2.0 * length for length in lengths]
    assert not any(one.cut for one in found)
    assert seen == list(range(8))  # the first environment alone


def test_an_episode_stops_where_the_model_knows_no_time(tmp_path: Path) -> None:
    policy = Policy.load(save(tmp_path / "short.safetensors", {"max_episode_length": 6}, max_episode_length=6))
    found = roll_out(policy, [Stair(), Stair()], [3.0, 3.0], [3, 50])
    assert [(one.length, one.cut) for one in found] == [(3, False), (6, True)]


def test_how_many_run_at_once_changes_nothing(checkpoint: Path) -> None:
    policy = Policy.load(checkpoint)
    together = roll_out(policy, [make("CartPole-v1", policy.model.config) for _ in range(3)], [50.0] * 3, [0, 1, 2])
    alone = [roll_out(policy, [make("CartPole-v1", policy.model.config)], [50.0], [seed])[0] for seed in range(3)]
    assert together == alone


def test_fit_then_roll_out(tmp_path: Path, run: Run) -> None:
    """From the embedded data to a table, a picture in the run's folder, and JSON; nothing else has to be told."""
    flags = ["--trainer.max_epochs", 1, "--trainer.default_root_dir", tmp_path]
    result = run("fit", "dt", *PLAIN["dt"], *flags)
    assert result.code == 0, result.err
    (folder,) = (tmp_path / "dt").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metric"] == "return"
    assert summary["value"] >= 5
    out = tmp_path / "r.json"
    result = run(
        *("rollout", "dt", "--checkpoint", folder, "--target-return", 500, 100, "--episodes", 3, "--num-envs", 2),
        *("--json", out),
    )
    assert result.code == 0, result.err
    header, *rows = result.out.splitlines()[1:4]
    assert header.split() == ["target", "achieved", "score", "steps"]
    assert [row.split()[0] for row in rows] == ["500.0", "100.0"]
    report = json.loads(out.read_text())
    assert (report["environment"], report["episodes"]) == ("CartPole-v1", 3)
    for row in report["results"]:
        assert row["mean"] == pytest.approx(np.mean(row["returns"]))
        assert row["std"] == pytest.approx(np.std(row["returns"]))
        assert row["lengths"] == row["returns"]  # a step is worth 1
        assert row["normalized_score"] is None
    with Image.open(folder / "rollout.png") as picture:
        assert picture.size == (720, 600)


def test_json_alone_on_standard_output(checkpoint: Path, run: Run) -> None:
    result = run("rollout", "dt", "--checkpoint", checkpoint, "--episodes", 2, "--json")
    (row,) = json.loads(result.out)["results"]
    assert row["target_return"] == 500  # the highest of the data
    assert len(row["returns"]) == 2


def test_a_film(checkpoint: Path, tmp_path: Path, run: Run) -> None:
    film = tmp_path / "out.mp4"
    result = run("rollout", "dt", "--checkpoint", checkpoint, "--episodes", 1, "--video", film, "--json")
    assert result.code == 0, result.err
    steps = json.loads(result.out)["results"][0]["lengths"][0]
    with av.open(str(film)) as container:
        frames = sum(1 for _ in container.decode(video=0))
    assert frames == steps + 1


def test_cloning_takes_no_target(tmp_path: Path, run: Run) -> None:
    source = save(tmp_path / "bc.safetensors", returns=False)
    result = run("rollout", "dt", "--checkpoint", source, "--episodes", 2, "--picture", tmp_path / "p.png")
    assert result.code == 0, result.err
    assert result.out.splitlines()[2].split()[0] == "–"
    refused = run("rollout", "dt", "--checkpoint", source, "--target-return", 5)
    assert (refused.code, refused.error) == (
        2,
        "--target-return: this model clones behaviour (model.returns false), which takes none",
    )


def test_a_target_that_no_data_had_is_told(checkpoint: Path, run: Run) -> None:
    result = run("rollout", "dt", "--checkpoint", checkpoint, "--episodes", 1, "--target-return", 1e6, -5)
    assert result.code == 0
    assert "--target-return 1e+06 is above the highest return 500 of what the model learned from" in result.err
    assert "--target-return -5 is below the lowest return 10 of what the model learned from" in result.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--environment Nothing-v0", "environment 'Nothing-v0' cannot be made:"),
        (
            "--environment MountainCar-v0",
            "observations are Box([-1.2 -0.07], [0.6 0.07], (2,), float32), expected those of shape (4,)",
        ),
        ("--target-return much", "'much' is not a finite number"),
        ("--target-return nan", "'nan' is not a finite number"),
        ("--episodes 0", "'0' is not a whole number of at least 1"),
        ("--seed -1", "--seed -1: expected at least 0"),
        ("--json nowhere/r.json", "--json nowhere/r.json: no such folder"),
        ("--picture p.jpg", "--picture p.jpg: the name ends in '.jpg', expected .png"),
        ("--video v.avi", "--video v.avi: the name ends in '.avi', expected .mp4"),
        ("--target-retrun 5", "unknown flag --target-retrun: did you mean --target-return?"),
    ],
)
def test_mistakes(flags: str, message: str, checkpoint: Path, run: Run) -> None:
    result = run("rollout", "dt", "--checkpoint", checkpoint, *flags.split())
    assert result.code == 2
    assert message in result.error


@pytest.mark.parametrize(
    ("scales", "options", "message"),
    [
        ({"environment": None}, {}, "does not say which environment it is for, expected --environment NAME"),
        ({"environment": "evil:CartPole-v1"}, {}, "names a module to import; to allow it, --environment"),
        ({}, {"action_dim": 3}, "actions are Discrete(2), expected 3 discrete ones as the model was trained on"),
        ({}, {"discrete": False}, "actions are Discrete(2), expected vectors of 2 numbers as the model"),
        ({"return_range": None}, {}, "its preprocessing cannot be used"),
    ],
)
def test_checkpoints_that_do_not_fit(
    scales: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, run: Run
) -> None:
    result = run("rollout", "dt", "--checkpoint", save(tmp_path / "m.safetensors", scales, **options))
    assert result.code == 2
    assert message in result.error
