"""The Lightning module: losses over real steps alone, heads, and what is measured with and without an environment."""

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.nn.functional import cross_entropy

from tasks.dt.data import EpisodeData
from tasks.dt.metrics import AchievedReturn, ReturnCalibration
from tasks.dt.task import DTModule

TINY: dict[str, Any] = {
    "state_shape": (4,),
    "action_dim": 2,
    "discrete": True,
    "embed_dim": 16,
    "depth": 1,
    "num_heads": 2,
    "context_length": 5,
    "max_episode_length": 500,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "embed_dropout": 0.0,
}


def batch(discrete: bool = True) -> dict[str, Tensor]:
    """Two windows, of which the second has two real steps."""
    actions = torch.randint(2, (2, 5)) if discrete else torch.rand(2, 5, 2) * 2 - 1
    return {
        "state": torch.randn(2, 5, 4),
        "action": actions,
        "timestep": torch.arange(5).repeat(2, 1),
        "return": torch.rand(2, 5),
        "valid": torch.tensor([[True] * 5, [True, True, False, False, False]]),
    }


@pytest.mark.parametrize("discrete", [True, False])
def test_the_loss_is_over_real_steps_alone(discrete: bool) -> None:
    module, given = DTModule(**(TINY | {"discrete": discrete})), batch(discrete)
    found = module.model(given["state"], given["action"], given["timestep"], given["return"])[given["valid"]]
    wanted = given["action"][given["valid"]]
    expected = cross_entropy(found, wanted) if discrete else (found - wanted).square().mean()
    assert module.loss(given).item() == pytest.approx(expected.item(), rel=1e-5)
    before = module.loss(given).item()
    for name in ("state", "return"):
        given[name][1, 2:] += 100
    assert module.loss(given).item() == before


def test_heads_for_state_and_return_learn_what_follows() -> None:
    module, given = DTModule(auxiliary=True, state_weight=0.5, return_weight=2.0, **TINY), batch()
    found = module.model(given["state"], given["action"], given["timestep"], given["return"], auxiliary=True)
    followed = given["valid"][:, 1:]
    action = cross_entropy(found.actions[given["valid"]], given["action"][given["valid"]])
    state = (found.states[:, :-1] - given["state"][:, 1:])[followed].square().mean()
    left = (found.returns[:, :-1] - given["return"][:, 1:])[followed].square().mean()
    expected = action + 0.5 * state + 2 * left
    assert module.loss(given).item() == pytest.approx(expected.item(), rel=1e-5)
    alone = {name: value[:, :1] for name, value in given.items()}
    assert module.loss(alone).isfinite()


def test_heads_that_nothing_teaches_are_left_out_of_training() -> None:
    """Or several processes would wait for their gradients."""
    module = DTModule(auxiliary=True, return_weight=1.0, **TINY)
    frozen = {name for name, parameter in module.model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"predict_state.weight", "predict_state.bias"}
    module.loss(batch()).backward()
    trained = [parameter for parameter in module.model.parameters() if parameter.requires_grad]
    assert all(parameter.grad is not None for parameter in trained)
    with pytest.raises(ValueError, match=r"state_weight is 1\.0, but the model has no such head"):
        DTModule(state_weight=1.0, **TINY)
    with pytest.raises(ValueError, match="episodes is -1, expected at least 0"):
        DTModule(episodes=-1, **TINY)


def test_returns_that_were_achieved() -> None:
    metric = AchievedReturn()
    metric.update(torch.zeros(0))
    assert metric.compute() == {}
    metric.update(torch.tensor([1.0, 2.0]))
    metric.update(torch.tensor([6.0]))
    assert metric.compute()["return"] == 3


def test_calibration_is_the_correlation() -> None:
    metric = ReturnCalibration()
    metric.update(torch.zeros(0), torch.zeros(0))
    assert metric.compute() == {}
    x, y = torch.randn(50), torch.randn(50)
    metric.update(x[:20], (x + y)[:20])
    metric.update(x[20:], (x + y)[20:])
    expected = np.corrcoef(x, x + y)[0, 1]
    assert metric.compute()["return_calibration"].item() == pytest.approx(expected, abs=1e-5)
    metric.reset()
    metric.update(torch.ones(5), torch.randn(5))
    assert metric.compute() == {}  # nothing varies


def _fitted(data: EpisodeData, epochs: int = 1, **options: Any) -> tuple[DTModule, dict[str, float]]:
    values = TINY | {"state_shape": data.state_shape, "max_episode_length": data.longest} | options
    module = DTModule(lr=3e-3, warmup=0.0, **values)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=epochs, num_sanity_val_steps=0, enable_model_summary=False, **quiet)
    trainer.fit(module, data)
    return module, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_run_rolls_out_and_a_model_heeds_returns() -> None:
    """Actions that the return decides: asked for the return, the model is calibrated, and cloning cannot be."""
    from tasks.dt.episodes import Episode, Recorded

    random = np.random.default_rng(0)
    episodes = []
    for index in range(60):
        good = index % 2
        seen = random.normal(size=(20, 4)).astype(np.float32)
        actions = np.full(20, good)
        episodes.append(Episode(f"{index}", seen, actions, np.full(20, float(good))))
    data = EpisodeData(num_episodes=1, context_length=5, environment="CartPole-v1", max_episode_length=500)
    data.__dict__.pop("_splits", None)
    data.recorded = Recorded(episodes, "CartPole-v1", action_dim=2)
    data.preprocess = data._preprocess({}, False)
    module, metrics = _fitted(data, 10, episodes=2)
    assert metrics["val/action_error"] < 0.05
    assert metrics["val/return_calibration"] > 0.7  # 1 but for the steps of the candidates
    assert metrics["val/return"] >= 5  # steps that the pole was up
    assert module.val_metrics["return"].count == 0  # measured anew each time
    data.datasets.clear()
    _, cloned = _fitted(data, episodes=2, returns=False)
    assert "val/return_calibration" not in cloned
    assert cloned["val/return"] >= 5


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("nowhere/Nothing-v0", "no roll-outs, .* environment 'nowhere/Nothing-v0' cannot be made"),
        ("MountainCar-v0", r"no roll-outs, .* observations are Box.* expected those of shape \(4,\)"),
    ],
)
def test_without_an_environment_recorded_episodes_are_what_is_measured(environment: str, message: str) -> None:
    data = EpisodeData(num_episodes=5, context_length=5, environment=environment, max_episode_length=500)
    with pytest.warns(UserWarning, match=message):
        _, metrics = _fitted(data, episodes=2)
    assert "val/return" not in metrics
    assert {"val/loss", "val/action_error"} <= metrics.keys()
