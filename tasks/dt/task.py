"""The Lightning module of the Decision Transformer, and of behaviour cloning by the same stack.

B batch, T steps of a window
"""

from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, Metric, MetricCollection

from multimodal.models.decision_transformer import DecisionTransformer, DecisionTransformerConfig
from tasks.base import Batch, TaskModule, masked_mean
from tasks.dt.environment import Environment, make, roll_out
from tasks.dt.metrics import AchievedReturn, ReturnCalibration
from tasks.dt.policy import Policy
from tasks.dt.preprocess import TrajectoryPreprocess

CANDIDATES = 11
"""Returns to go of which the likeliest is looked for, from none to the largest in the data."""
SEEDS = {"val": 1000, "test": 2000}
"""Of the first episode that is played to measure a split; those after it have the numbers after it."""


class DTModule(TaskModule):
    """A Decision Transformer; with `model.returns` false it clones behaviour."""

    task = "dt"
    model: DecisionTransformer

    def build(
        self,
        *,
        state_weight: float = 0.0,
        return_weight: float = 0.0,
        episodes: int = 20,
        target_return: float | None = None,
        **model: Any,
    ) -> DecisionTransformer:
        """The model.

        Args:
            state_weight: Weight of the squared error of the next state beside the action's loss; needs auxiliary.
            return_weight: Weight of the squared error of the return that is left; needs auxiliary.
            episodes: Roll-outs by which val/return and test/return are measured, where the environment is there; 0 =
                none.
            target_return: The return that is asked for in these; None = the highest of a training episode.
        """
        for name, value in (("state_weight", state_weight), ("return_weight", return_weight), ("episodes", episodes)):
            if value < 0:
                raise ValueError(f"{name} is {value}, expected at least 0")
        transformer = DecisionTransformer(DecisionTransformerConfig(**model))
        heads = {"state_weight": transformer.predict_state, "return_weight": transformer.predict_return}
        self.weights = {"state_weight": state_weight, "return_weight": return_weight}
        for name, head in heads.items():
            if self.weights[name] and head is None:
                raise ValueError(f"{name} is {self.weights[name]}, but the model has no such head (model.auxiliary)")
            if head is not None and not self.weights[name]:
                head.requires_grad_(False)  # nothing teaches it
        self.episodes = episodes
        self.target_return = target_return
        self._environment_lacks = False
        return transformer

    def loss(self, batch: Batch) -> Tensor:
        valid, followed = batch["valid"], batch["valid"][:, 1:]
        if not any(self.weights.values()):
            return masked_mean(self._action_loss(self._actions(batch), batch), valid)
        found = self.model(*self._inputs(batch), auxiliary=True)
        loss = masked_mean(self._action_loss(found.actions, batch), valid)
        for name, predicted, true in (
            ("state_weight", found.states, batch["state"]),
            ("return_weight", found.returns, batch["return"]),
        ):
            if self.weights[name]:
                errors = (predicted[:, :-1].float() - true[:, 1:]).square()
                errors = errors.flatten(2).mean(dim=2) if errors.dim() > 2 else errors
                loss = loss + self.weights[name] * masked_mean(errors, followed)
        return loss

    def _inputs(self, batch: Batch) -> tuple[Tensor | None, ...]:
        """What the model is called with. Padding is behind, where a causal model does not look: it needs no mask."""
        dtype = self.model.embed_action.weight.dtype
        states, actions = batch["state"].to(dtype), batch["action"]
        returns = batch["return"].to(dtype) if self.model.config.returns else None
        return states, actions, batch["timestep"], returns

    def _actions(self, batch: Batch) -> Tensor:
        return self.model(*self._inputs(batch))

    def _action_loss(self, predicted: Tensor, batch: Batch) -> Tensor:
        """For each step, [B, T]: cross-entropy of discrete actions, else the mean squared error."""
        if self.model.config.discrete:
            return cross_entropy(predicted.float().transpose(1, 2), batch["action"], reduction="none")
        return (predicted.float() - batch["action"]).square().mean(dim=2)

    def metrics_of(self) -> dict[str, Metric]:
        found: dict[str, Metric] = {
            "loss": MeanMetric(nan_strategy="disable"),
            "action_error": MeanMetric(nan_strategy="disable"),
            "return": AchievedReturn(),
        }
        if self.model.config.returns:
            found["calibration"] = ReturnCalibration()
        return found

    def evaluate(self, batch: Batch, metrics: MetricCollection) -> None:
        predicted, valid = self._actions(batch), batch["valid"]
        losses = self._action_loss(predicted, batch)
        discrete = self.model.config.discrete
        wrong = (predicted.argmax(dim=2) != batch["action"]).float() if discrete else losses
        metrics["loss"].update(losses[valid])
        metrics["action_error"].update(wrong[valid])
        if self.model.config.returns:
            metrics["calibration"].update(*self._calibrate(batch))

    def _calibrate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """For each window, the return to go at its start under which its actions are the likeliest; and the true one.

        With another return at the start, that of each later step is as much higher or lower.
        """
        first, valid = batch["return"][:, :1], batch["valid"]
        scale = self._preprocess().return_scale
        low, high = (value / scale for value in self._preprocess().return_range)
        candidates = torch.linspace(min(low, 0.0), max(high, 0.0), CANDIDATES, device=first.device)
        losses = []
        for candidate in candidates:
            shifted = {**batch, "return": batch["return"] - first + candidate}
            losses.append((self._action_loss(self._actions(shifted), batch) * valid).sum(dim=1))
        return candidates[torch.stack(losses).argmin(dim=0)], first[:, 0]

    def on_validation_epoch_end(self) -> None:
        self.val_metrics["return"].update(self._achieved("val"))
        super().on_validation_epoch_end()

    def on_test_epoch_end(self) -> None:
        self.test_metrics["return"].update(self._achieved("test"))
        super().on_test_epoch_end()

    def _preprocess(self) -> TrajectoryPreprocess:
        preprocess: TrajectoryPreprocess = self.trainer.datamodule.preprocess  # type: ignore[attr-defined]
        return preprocess

    def _achieved(self, split: str) -> Tensor:
        """The returns of this process's share of the episodes; none where the environment is not there."""
        preprocess = self._preprocess()
        environments = self._environments(preprocess.environment)
        if not environments:
            return torch.zeros(0, device=self.device)
        target = preprocess.return_range[1] if self.target_return is None else self.target_return
        targets = [target] * len(environments) if self.model.config.returns else None
        seeds = range(SEEDS[split] + self.global_rank, SEEDS[split] + self.episodes, self.trainer.world_size)
        outcomes = roll_out(Policy(self.model, preprocess), environments, targets, seeds)
        for environment in environments:
            environment.close()
        return torch.tensor([one.total for one in outcomes], device=self.device)

    def _environments(self, name: str | None) -> list[Environment]:
        """One for each episode of this process; none where they cannot be had, which is told once."""
        if self.trainer.sanity_checking or name is None or self._environment_lacks:
            return []
        try:
            if self.device_mesh is not None:
                raise ValueError("a model that is divided among processes does not act while it trains")
            return [
                make(name, self.model.config) for _ in range(self.global_rank, self.episodes, self.trainer.world_size)
            ]
        except ValueError as error:
            rank_zero_warn(f"no roll-outs, the metrics are those on recorded episodes alone: {error}")
            self._environment_lacks = True
            return []
