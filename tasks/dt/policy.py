"""A trained Decision Transformer as a policy: arrays in, actions out, a step of one or several environments at a time.

B environments, T steps in the window, n tokens a step, D embed_dim
"""

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from multimodal import pretrained
from multimodal.attention import BlockCache, StackCache
from multimodal.linear import lay_out_for_few_rows
from multimodal.models.decision_transformer import DecisionTransformer
from tasks.dt.preprocess import TrajectoryPreprocess

Step = tuple[Tensor, Tensor, Tensor]
"""States [B, …], actions [B, …] and returns [B] of a step, in the model's numbers."""


class Policy:
    """Acts so as to get a return that is asked for (Chen et al. 2021, algorithm 1).

        policy = Policy.load("runs/dt/…")
        policy.reset(target_return=500)
        observation, _ = environment.reset()
        action = policy.act(observation)
        observation, reward, terminated, truncated, _ = environment.step(action)
        action = policy.act(observation, reward)

    Several environments go in step: then the target is one number or [B], observations are [B, ...], rewards [B], and
    actions come as [B, ...]. `keep` goes on with some of them.

    Until the window of `context_length` steps slides, keys and values of the tokens so far are kept; afterwards the
    window runs anew, since what its tokens have seen is no longer there. The actions are those of the whole model on
    the window, to rounding.

    Args:
        model: in evaluation mode, on its device.
        preprocess: how states, actions and returns are scaled.
    """

    def __init__(self, model: DecisionTransformer, preprocess: TrajectoryPreprocess) -> None:
        self.model = model
        self.preprocess = preprocess
        self.step = 0
        """Steps acted since the reset."""
        self._target: np.ndarray | None = None
        self._returns = np.zeros(0)
        self._single = False
        self._cached: list[Tensor] = []
        self._window = torch.zeros(0)
        self._last: Step | None = None
        self._grow_window, self._slide_window = self._grow, self._slide

    @classmethod
    def load(cls, source: str | os.PathLike[str], device: torch.device | str = "cpu") -> "Policy":
        """From a checkpoint; ValueError where it does not say how its states and returns are scaled."""
        loaded = pretrained.load(source, task="dt")
        if loaded.preprocess is None:
            raise ValueError(f"{os.fspath(source)}: lacks how its states and returns were scaled, which a policy needs")
        preprocess = TrajectoryPreprocess.from_dict(loaded.preprocess, os.fspath(source))
        model = loaded.model.to(device)
        lay_out_for_few_rows(model)
        return cls(model, preprocess)  # type: ignore[arg-type]

    def compile(self, options: dict[str, Any] | None = None) -> None:
        """Compile a step, within the first window and once that slides: the first one of each then takes long.

        Args:
            options: of `torch.compile`.
        """
        self._grow_window = torch.compile(self._grow, options=options, dynamic=False)
        self._slide_window = torch.compile(self._slide, options=options, dynamic=False)

    def reset(self, target_return: ArrayLike | None = None) -> None:
        """Begin episodes; a policy without returns (behaviour cloning) takes no target."""
        if (target_return is not None) != self.model.config.returns:
            found, expected = ("a", "none") if target_return is not None else ("no", "a return to ask for")
            raise ValueError(f"target_return: {found} target is given, expected {expected}")
        self._target = None if target_return is None else np.asarray(target_return, dtype=np.float64)
        if self._target is not None and not np.isfinite(self._target).all():
            raise ValueError(f"target_return is {self._target.tolist()}, expected finite numbers")
        self.step = 0
        self._last = None

    @torch.inference_mode()
    def act(self, observation: ArrayLike, reward: ArrayLike | None = None) -> Any:
        """The action for what is observed now, as the environment takes it.

        Args:
            observation: [...], or [B, ...] of several environments, in the environment's own numbers.
            reward: for the action before, a number or [B]; None at the first step.

        Raises:
            ValueError: shapes that do not fit, a missing reward, or a step past the longest episode that the model
                has timesteps for.
        """
        states = self._states(np.asarray(observation))
        self._count_reward(reward)
        if self.step >= self.model.config.max_episode_length:
            raise ValueError(
                f"step {self.step}: the model has timesteps for episodes of up to "
                f"{self.model.config.max_episode_length} steps"
            )
        returns = self._tensor(self._returns / self.preprocess.return_scale)
        actions = self._actions(states, returns)
        self._last = (states, actions, returns)
        self.step += 1
        return self._for_environment(actions)

    def keep(self, index: ArrayLike) -> None:
        """Go on with the environments of these positions alone, in this order."""
        chosen = np.asarray(index)
        if chosen.size and chosen.dtype.kind not in "iu":
            raise ValueError(f"positions are {chosen.dtype}, expected whole numbers")
        chosen = chosen.astype(np.int64)
        rows = torch.from_numpy(chosen).to(self._device)
        self._returns = self._returns[chosen]
        self._cached = [part[rows] for part in self._cached]
        if self._last is not None:
            self._window = self._window[rows]
            states, actions, returns = (part[rows] for part in self._last)
            self._last = (states, actions, returns)

    @property
    def _device(self) -> torch.device:
        return self.model.embed_action.weight.device

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device, self.model.embed_action.weight.dtype)

    def _states(self, observation: np.ndarray) -> Tensor:
        """States [B, ...] of an observation, one row for a single environment."""
        shape = self.model.config.state_shape
        single = observation.shape == shape
        if not single and observation.shape[1:] != shape:
            raise ValueError(f"observation of shape {observation.shape}, expected {shape}, or [B, …] of such")
        if self.step == 0:
            count = 1 if single else len(observation)
            self._single = single
            target = np.zeros(()) if self._target is None else self._target
            if target.shape not in ((), (count,)):
                raise ValueError(
                    f"target_return has shape {target.shape}, expected one for each of {count} environments"
                )
            self._returns = np.broadcast_to(target, (count,)).copy()
        rows = observation[None] if single else observation
        if single != self._single or len(rows) != len(self._returns):
            raise ValueError(f"observation of shape {observation.shape}, expected {len(self._returns)} as before")
        if not np.isfinite(rows).all():
            raise ValueError(f"observation at step {self.step} is not finite, expected numbers")
        return self._tensor(self.preprocess.states(rows))

    def _count_reward(self, reward: ArrayLike | None) -> None:
        if (reward is not None) != (self.step > 0):
            found, expected = ("given", "none") if reward is not None else ("missing", "that of the last action")
            raise ValueError(f"reward is {found} at step {self.step}, expected {expected}")
        if reward is not None and not self.preprocess.delayed:
            rewards = np.asarray(reward, dtype=np.float64)
            if rewards.shape not in ((), self._returns.shape):
                raise ValueError(f"reward has shape {rewards.shape}, expected {self._returns.shape}")
            if not np.isfinite(rewards).all():
                raise ValueError(f"reward is {rewards.tolist()} at step {self.step}, expected finite numbers")
            self._returns = self._returns - rewards

    def _actions(self, states: Tensor, returns: Tensor) -> Tensor:
        """The model's actions [B, …]: indices of the discrete ones, else vectors."""
        config = self.model.config
        last = self._begin(states, returns) if self._last is None else self._last
        timesteps = torch.tensor([max(self.step - 1, 0), self.step], device=self._device)
        if self.step >= config.context_length:
            found, self._window = self._slide_window(self._window, last, states, returns, timesteps)
        else:
            grow = self._grow_window if self._cached else self._grow  # else no two shapes are the same
            found, self._window = grow(self._window, self._cached, last, states, returns, timesteps)
        return found.argmax(dim=1) if config.discrete else found

    def _begin(self, states: Tensor, returns: Tensor) -> Step:
        """An empty window, and a step that never was, of whose tokens none is seen."""
        config, count = self.model.config, len(states)
        length = config.tokens_per_step * config.context_length
        self._window = states.new_zeros(count, length, config.embed_dim)
        attentions = [block.self_attn for block in self.model.encoder.blocks]
        supported = all({"cache", "mask"} <= attention.kernel.supports for attention in attentions)
        shapes = [(count, config.num_kv_heads or config.num_heads, length, one.head_dim) for one in attentions]
        cached = supported and config.rope is None
        self._cached = [states.new_zeros(shape) for shape in shapes for _ in range(2)] if cached else []
        shape = (count,) if config.discrete else (count, config.action_dim)
        none = torch.zeros(shape, dtype=torch.int64 if config.discrete else states.dtype, device=self._device)
        return states, none, returns

    def _grow(
        self, window: Tensor, cached: list[Tensor], last: Step, states: Tensor, returns: Tensor, timesteps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the model says of a step, and the window with that step, which is within the first K."""
        tokens, window = self._tokens(window, last, states, returns, timesteps)
        if not cached:
            return self.model.next_action(window[:, 1 - tokens.shape[1] * (self.step + 1) :]), window
        places = torch.arange(window.shape[1], device=window.device)
        positions = places[: tokens.shape[1]] + timesteps[1] * tokens.shape[1]
        pairs = zip(cached[::2], cached[1::2], strict=True)
        cache = StackCache([BlockCache.static(keys, values, positions) for keys, values in pairs])
        mask = (places > 0) & (places <= positions[:, None])
        return self.model.next_action(tokens, cache, mask[None, None]), window

    def _slide(
        self, window: Tensor, last: Step, states: Tensor, returns: Tensor, timesteps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same of a later step."""
        _, window = self._tokens(window, last, states, returns, timesteps)
        return self.model.next_action(window[:, 1:]), window

    def _tokens(
        self, window: Tensor, last: Step, states: Tensor, returns: Tensor, timesteps: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What is new, [B, n, D], and the window [B, n·K, D] that ends with it.

        New are the action of the step before, which the environment answered, and this step's return and state. So the
        window begins with an action that is seen no more, or never was.
        """
        last_states, last_actions, last_returns = last
        tokens = self.model.embed(
            torch.stack([last_states, states], dim=1),
            last_actions[:, None],
            timesteps.expand(len(states), -1),
            torch.stack([last_returns, returns], dim=1) if self.model.config.returns else None,
        )[:, -self.model.config.tokens_per_step :]
        return tokens, torch.cat([window[:, tokens.shape[1] :], tokens], dim=1)

    def _for_environment(self, actions: Tensor) -> Any:
        found = actions.cpu().numpy() if self.model.config.discrete else actions.float().cpu().numpy()
        if not self.model.config.discrete:
            found = self.preprocess.to_environment(found)
        return found[0] if self._single else found
