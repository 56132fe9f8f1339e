"""Recorded episodes: where they are read from, what is checked, and the windows that batches are made of."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from minari.data_collector import EpisodeBuffer

from tasks.dt import cartpole, d4rl, minari_data
from tasks.dt.data import EpisodeData
from tasks.dt.episodes import best, checked, returns_to_go, same_shapes, statistics
from tasks.dt.preprocess import TrajectoryPreprocess
from tasks.dt.windows import Windows
from tests.tasks.dt.recorded import arrays, episode, write_hdf5, write_npz

PLAIN = TrajectoryPreprocess(
    state_mean=(0.0,) * 3,
    state_std=(1.0,) * 3,
    action_low=None,
    action_high=None,
    return_scale=2.0,
    return_range=(0.0, 9.0),
    max_episode_length=50,
)


def data_of(root: Path | None = None, **options: Any) -> EpisodeData:
    return EpisodeData(root=None if root is None else str(root), **({"context_length": 4} | options))


# -------------------------------------------------------------------------------------------------------- D4RL's form


@pytest.mark.parametrize("write", [write_npz, write_hdf5], ids=["npz", "hdf5"])
def test_d4rl(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{write.__name__.removeprefix('write_')}", [3, 1, 5])
    expected = arrays([3, 1, 5])
    for root, files in ((path, None), (tmp_path, None), (tmp_path, [path.name])):
        found = d4rl.read(str(root), files).episodes
        assert [len(one.rewards) for one in found] == [3, 1, 5]
        np.testing.assert_array_equal(np.concatenate([one.observations for one in found]), expected["observations"])
        np.testing.assert_array_equal(found[1].actions, expected["actions"][3:4])
    assert found[2].name == f"{path.name} episode 2 (from step 4)"


def test_an_episode_may_end_by_time_and_what_has_no_end_is_left_out(tmp_path: Path) -> None:
    values = arrays([4, 4, 3], timeouts=[1])
    assert not values["terminals"][7]
    values["terminals"][-1] = False
    np.savez(tmp_path / "a.npz", **values)
    with pytest.warns(UserWarning, match="its last 3 steps are left out, since no end"):
        found = d4rl.read(str(tmp_path), None).episodes
    assert [len(one.rewards) for one in found] == [4, 4]


def _spoilt(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        values = arrays([3, 4])
        for name, change in changes.items():
            values[name] = change(values[name])
        np.savez(folder / "a.npz", **{name: value for name, value in values.items() if value is not None})

    return write


def _set(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[4] = value
        return array

    return change


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_spoilt(rewards=_set(np.nan)), r"a.npz episode 1 \(from step 3\): rewards of step 1 are not finite"),
        (_spoilt(observations=_set(np.inf)), r"a.npz episode 1 \(from step 3\): observations of step 1 are not finite"),
        (_spoilt(observations=lambda x: x[:-1]), r"observations has shape \(6, 5\), expected 7 steps as rewards"),
        (_spoilt(rewards=lambda x: None), "no rewards in it, expected observations, actions, rewards, terminals"),
        (_spoilt(terminals=lambda x: x & False), "no step ends an episode"),
        (_spoilt(actions=lambda x: x[:, :, None]), r"actions \(3, 2, 1\), .* expected observations \[T, S\]"),
        (_spoilt(observations=lambda x: x.astype(str)), "observations of type <U.*, expected numbers"),
        (lambda folder: (folder / "a.npz").write_bytes(b"PK" + bytes(100)), "damaged, or no file of D4RL's form"),
        (lambda folder: (folder / "a.npz").write_bytes(b""), "damaged, or no file of D4RL's form"),
        (lambda folder: (folder / "a.hdf5").write_bytes(bytes(100)), "damaged, or no file of D4RL's form"),
        (lambda folder: np.savez(folder / "a.npz", rewards=np.array([{}], dtype=object)), "damaged, or no file"),
        (lambda folder: None, "no file ending in .npz, .hdf5, .h5, expected at least one"),
    ],
)
def test_files_that_are_wrong(write: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        data_of(tmp_path)


def test_files_have_to_lie_in_the_folder(tmp_path: Path) -> None:
    write_npz(tmp_path / "in" / "a.npz", [3])
    write_npz(tmp_path / "b.npz", [3])
    for root, files, message in (
        (tmp_path / "in", ["../b.npz"], r"data.files: ../b.npz leads out of"),
        (tmp_path / "in", ["c.npz"], "no file c.npz in it"),
        (tmp_path / "b.npz", ["b.npz"], "a file, and data.files names some"),
        (tmp_path / "nowhere", None, "no such file or folder"),
    ):
        with pytest.raises(ValueError, match=message):
            d4rl.read(str(root), files)


# ------------------------------------------------------------------------------------------------------------- Minari


def _minari(lengths: list[int], *, extra: int = 1, end: int = -1, discrete: bool = False) -> str:
    """A data set in Minari's folder; `extra` observations more than steps, the end marked at step `end`."""
    random = np.random.default_rng(0)
    buffers = []
    for steps in lengths:
        marks = np.zeros(steps, dtype=bool)
        marks[end] = True
        actions = random.integers(2, 5, steps) if discrete else random.uniform(-2, 2, (steps, 2)).astype(np.float32)
        buffers.append(
            EpisodeBuffer(
                observations=list(random.normal(size=(steps + extra, 3)).astype(np.float32)),
                actions=list(actions),
                rewards=list(random.uniform(0, 1, steps)),
                terminations=[False] * steps,
                truncations=list(marks),
            )
        )
    made = minari.create_dataset_from_buffers(
        "test/walk-v0",
        buffers,
        action_space=Discrete(3, start=2) if discrete else Box(-2, 2, (2,)),
        observation_space=Box(-9, 9, (3,)),
        data_format="hdf5",
    )
    made.storage.update_metadata({"ref_min_score": 1.0, "ref_max_score": 21.0})
    return "test/walk-v0"


@pytest.fixture
def minari_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.mark.filterwarnings("ignore")
def test_minari(minari_folder: Path) -> None:
    name = _minari([5, 1, 4])
    for root in (name, str(minari_folder / name)):
        found = minari_data.read(root)
        assert [len(one.observations) for one in found.episodes] == [5, 1, 4]  # without what is seen at the end
        assert found.reference_returns == (1.0, 21.0)
        assert (found.action_low, found.action_high) == ((-2.0, -2.0), (2.0, 2.0))
    data = EpisodeData(dataset="minari", root=name, context_length=4)
    assert data.preprocess.normalized_score(11.0) == pytest.approx(50)
    actions = np.concatenate([one.actions for one in data.recorded.episodes])
    np.testing.assert_allclose(data.preprocess.to_model(actions), actions / 2, atol=1e-6)
    np.testing.assert_allclose(data.preprocess.to_environment(actions / 2), actions, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_minari_actions_may_begin_at_another_number(minari_folder: Path) -> None:
    found = minari_data.read(_minari([6], discrete=True))
    assert found.action_dim == 3
    assert set(found.episodes[0].actions) <= {0, 1, 2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": 0}, "test/walk-v0 episode 1: 4 observations for 4 steps, expected 5"),
        ({"end": 0}, "test/walk-v0 episode 1: terminated or truncated before its last step"),
    ],
)
def test_wrong_episodes_of_minari(options: dict[str, Any], message: str, minari_folder: Path) -> None:
    name = _minari([1, 4] if "end" in options else [4], **options)
    message = message if "end" in options else message.replace("episode 1", "episode 0")
    with pytest.raises(ValueError, match=message):
        minari_data.read(name)


def test_no_such_data_set_of_minari(minari_folder: Path, tmp_path: Path) -> None:
    for root in ("nothing-v0", str(tmp_path)):
        with pytest.raises(ValueError, match="no data set of Minari's"):
            minari_data.read(root)


# ----------------------------------------------------------------------------------------------------------- episodes


def test_episodes_have_to_be_whole_and_alike() -> None:
    with pytest.raises(ValueError, match="e: 3 observations, 2 actions, 3 rewards, expected as many of each"):
        checked("e", np.zeros((3, 2)), np.zeros((2, 1)), np.zeros(3))
    with pytest.raises(ValueError, match="e: no step in it"):
        checked("e", np.zeros((0, 2)), np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(ValueError, match="e: action -1, expected whole numbers from 0"):
        checked("e", np.zeros((1, 2)), np.array([-1]), np.zeros(1))
    assert checked("e", np.zeros((2, 2)), np.zeros(2), np.zeros(2)).actions.shape == (2, 1)
    with pytest.raises(ValueError, match=r"two: actions of shape \(\), expected \(2,\) as in one"):
        same_shapes([episode([1.0]), episode([1.0], name="two", discrete=True)])


def test_returns_to_go() -> None:
    rewards = np.array([1.0, -2.0, 4.0])
    assert returns_to_go(rewards).tolist() == [3.0, 2.0, 4.0]
    assert returns_to_go(rewards, delayed=True).tolist() == [3.0, 3.0, 3.0]


def test_the_best_share_of_the_steps() -> None:
    """As many of the best episodes as fit, in their order, and at least one."""
    episodes = [episode([value] * 10, name=str(value)) for value in (2.0, 5.0, 1.0, 4.0, 3.0)]
    assert [one.name for one in best(episodes, 0.5)] == ["5.0", "4.0"]
    assert [one.name for one in best(episodes, 0.01)] == ["5.0"]
    assert len(best(episodes, 1.0)) == 5


def test_statistics_leave_a_number_that_never_changes_finite() -> None:
    mean, std = statistics([episode([0.0] * 3), episode([0.0])])
    assert mean == (0.75, 1.0, 0.0)
    assert std[1] == std[2] == pytest.approx(1e-6)


# ------------------------------------------------------------------------------------------------------------ windows


def test_every_step_begins_a_window_and_an_episode_ends_one() -> None:
    windows = Windows([episode([1.0] * 5), episode([3.0])], PLAIN, 4, training=True)
    assert len(windows) == 6  # the longer episode comes up as often as it is long
    batch = windows.__getitems__([(0, 1), (7, 3), (0, 5, 1)])
    assert batch["timestep"][:, 0].tolist() == [1, 3, 0]
    assert batch["valid"].tolist() == [[True] * 4, [True, True, False, False], [True, False, False, False]]
    assert batch["timestep"][0].tolist() == [1, 2, 3, 4]
    assert batch["return"][0].tolist() == [2.0, 1.5, 1.0, 0.5]  # scaled
    assert batch["state"][0, :, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch["return"][2, 0] == 1.5
    one = windows[(0, 1)]
    assert all(torch.equal(one[name], batch[name][0]) for name in batch)
    assert torch.equal(windows[1]["state"], one["state"])


def test_evaluation_counts_each_step_once() -> None:
    windows = Windows([episode([1.0] * 5), episode([3.0]), episode([1.0] * 8)], PLAIN, 4, training=False)
    batch = windows.__getitems__(range(len(windows)))
    assert int(batch["valid"].sum()) == 14
    assert batch["timestep"][batch["valid"]].tolist() == [*range(5), 0, *range(8)]


def test_images_are_divided_by_255() -> None:
    image = PLAIN.__class__(**(PLAIN.to_dict() | {"state_mean": None, "state_std": None}))
    pixels = np.full((2, 1, 36, 36), 255, dtype=np.uint8)
    one = checked("e", pixels, np.array([0, 1]), np.ones(2))
    batch = Windows([one], image, 2, training=True).__getitems__([0])
    assert batch["state"].shape == (1, 2, 1, 36, 36)
    assert batch["state"].unique().tolist() == [1.0]
    assert batch["action"].dtype == torch.int64


# -------------------------------------------------------------------------------------------------------- data modules


def test_what_a_policy_needs_is_found_in_the_training_episodes(tmp_path: Path) -> None:
    data = data_of(write_npz(tmp_path / "a.npz", [30, 20, 10, 40, 25]), environment="Hopper-v5")
    data.setup("fit")
    train = data.datasets["train"]
    sizes = [len(data._splits[split]) for split in ("train", "val", "test")]
    assert sizes == [3, 1, 1]
    preprocess = data.preprocess
    np.testing.assert_allclose(preprocess.state_mean, train.observations.mean(axis=0), atol=1e-6)
    assert train.returns.max() == pytest.approx(1.0)  # divided by the largest
    assert preprocess.return_range[1] == pytest.approx(preprocess.return_scale)
    assert preprocess.max_episode_length == 1000  # the environment's limit; the data end earlier
    assert preprocess.reference_returns == pytest.approx((-20.272305, 3234.3))
    assert preprocess.action_low is None
    again = data_of(tmp_path / "a.npz", **{n: v for n, v in preprocess.to_dict().items() if n != "delayed"})
    assert again.preprocess == preprocess
    assert (data.state_shape, data.action_dim, data.discrete, data.longest) == ((5,), 2, False, 1000)


def test_without_an_environment_the_longest_episode_is_the_limit(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", [30, 20, 10])
    assert data_of(path).longest == 30
    assert data_of(path, environment="nowhere/Nothing-v0").longest == 30
    with pytest.raises(ValueError, match=r"a.npz episode 0 .*: 30 steps, expected at most data.max_episode_length 29"):
        data_of(path, max_episode_length=29)


def test_delayed_rewards(tmp_path: Path) -> None:
    data = data_of(write_npz(tmp_path / "a.npz", [10, 10, 10]), delayed=True)
    data.setup("fit")
    windows = data.datasets["train"]
    assert data.preprocess.delayed
    assert len(set(windows.returns.tolist())) == len(data._splits["train"])


def test_the_best_share_is_of_training_alone(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", list(range(5, 45)))
    whole, top = data_of(path), data_of(path, top=0.1)
    assert len(top._splits["train"]) < len(whole._splits["train"]) / 4
    assert min(one.total for one in top._splits["train"]) >= max(one.total for one in whole._splits["train"]) / 2
    assert [one.name for one in top._splits["val"]] == [one.name for one in whole._splits["val"]]


@pytest.mark.filterwarnings("ignore")
def test_one_episode_and_one_step_are_enough(tmp_path: Path) -> None:
    for lengths in ([12], [1], [1, 1, 1]):
        data = data_of(write_npz(tmp_path / "a.npz", lengths))
        data.setup("fit")
        assert all(len(data.datasets[split]) for split in ("train", "val"))
    with pytest.warns(UserWarning, match="1 episodes are too few to hold some out: the val metrics"):
        data_of(write_npz(tmp_path / "a.npz", [12]))


def test_actions_beyond_one_get_bounds(tmp_path: Path) -> None:
    actions = 3 * arrays([9, 9])["actions"]
    path = write_npz(tmp_path / "a.npz", [9, 9], actions=actions)
    with pytest.warns(UserWarning, match="the data do not say the bounds of actions"):
        data = data_of(path)
    scaled = data.preprocess.to_model(actions)
    assert (scaled.min(), scaled.max()) == pytest.approx((-1, 1), abs=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = data_of(path, action_low=[-3.0, -3.0], action_high=[3.0, 3.0])
    np.testing.assert_allclose(given.preprocess.to_model(actions), actions / 3, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0.0}, r"data.top is 0.0, expected a share above 0 and up to 1"),
        ({"num_episodes": 0}, "data.num_episodes is 0, expected at least 1"),
        ({"dataset": "d4rl", "source": "https://x"}, "data.root is missing, .* the data come from https://x"),
        ({"state_mean": [1.0], "state_std": [1.0]}, "data.state_mean has 1 values, expected 4"),
        ({"state_mean": [1.0] * 4, "state_std": [1.0]}, "expected as many of each"),
        ({"action_low": [0.0], "action_high": [0.0]}, r"action_high is \(0.0,\), expected more than action_low"),
        ({"return_scale": 0.0}, "return_scale is 0.0, expected more than 0"),
        ({"files": ["a.npz"]}, r"data.files are a.npz, but data.root is missing"),
        ({"environment": "module:CartPole-v1"}, "names a module to import"),
        ({"environment": "MountainCar-v0"}, r"\d+ steps, but MountainCar-v0 ends an episode after 200"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_of(**({"num_episodes": 4} | options))


def test_an_action_that_never_changes_has_bounds_apart(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "a.npz", [9, 9], actions=np.full((18, 2), 100.0, np.float32))
    with pytest.warns(UserWarning, match="the data do not say the bounds of actions"):
        data = data_of(path)
    assert np.isfinite(data.preprocess.to_model(np.full((1, 2), 100.0))).all()


def test_rewards_without_steps_are_no_traceback(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{**arrays([3]), "rewards": np.float32(1)})
    with pytest.raises(ValueError, match="expected 1 steps as rewards"):
        d4rl.read(str(tmp_path), None)


def test_the_scale_of_returns_is_the_data_sets(tmp_path: Path) -> None:
    assert data_of(num_episodes=4).preprocess.return_scale == 50
    found = data_of(write_npz(tmp_path / "a.npz", [9, 9])).preprocess
    assert found.return_scale != 50


def test_cartpole_needs_no_root(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.dataset cartpole, which needs none"):
        data_of(tmp_path, dataset="cartpole")


def test_cartpole_is_the_same_each_time_and_has_returns_of_all_sizes() -> None:
    first, again = cartpole.record(80).episodes, cartpole.record(80).episodes
    assert all(np.array_equal(a.observations, b.observations) for a, b in zip(first, again, strict=True))
    returns = np.array([one.total for one in first])
    counts = np.histogram(returns, bins=[0, 80, 160, 240, 320, 400, 499, 501])[0]
    assert counts.min() >= 2
    assert counts[-1] >= 10
    limit = gymnasium.spec(cartpole.ENVIRONMENT).max_episode_steps
    assert all(len(one.rewards) <= limit for one in first)
