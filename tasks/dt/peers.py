"""Published Decision Transformers of the same size."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multimodal.models.decision_transformer import DecisionTransformerConfig
from multimodal.pretrained import published_dt
from tasks.dt.bench import roll_out
from tasks.peers import Attention, exported, from_pretrained, peer
from tasks.workload import Data, Peer, Setting, Workload


def peers(work: Workload, setting: Setting) -> list[Peer]:
    """Both run anew on the last K steps for each action; Hugging Face's has our weights, nanodt none of our biases."""
    config: DecisionTransformerConfig = work.config

    def hugging_face_work(model: Any, data: Data) -> Any:
        return _loss(_ask_hugging_face, model, data) if work.trains else act(_ask_hugging_face, model, data)

    def nanodt_work(model: Any, data: Data) -> Any:
        if not work.trains:
            return act(_ask_nanodt, model, data)
        return _ask_nanodt(model, data, targets=data["action"])[1]

    def act(ask: Any, model: nn.Module, data: Data) -> np.ndarray:
        policy = _Policy(ask, model, config, work.facts["return_scale"], setting)
        return roll_out(policy, data)

    return [
        peer(
            "Hugging Face", "transformers", work, setting, lambda kind: _hugging_face(config, kind), hugging_face_work
        ),
        peer("nanodt", "nanodt", work, setting, lambda _: _nanodt(config), nanodt_work, ("fused",)),
    ]


def _loss(ask: Any, model: nn.Module, data: Data) -> Tensor:
    error: Tensor = (ask(model, data).float() - data["action"]).square().mean()
    return error


def _ask_hugging_face(model: Any, data: Data) -> Tensor:
    found: Tensor = model(
        states=data["state"],
        actions=data["action"],
        returns_to_go=data["return"][..., None],
        timesteps=data["timestep"],
    ).action_preds
    return found


def _ask_nanodt(model: Any, data: Data, targets: Tensor | None = None) -> Any:
    given = data["state"], data["action"], data["return"][..., None], data["timestep"]
    valid = torch.ones(data["timestep"].shape, dtype=torch.bool, device=data["timestep"].device)
    found = model(*given, valid, targets)
    return found[0] if targets is None else found


def _hugging_face(config: DecisionTransformerConfig, kind: Attention) -> nn.Module:
    from transformers import DecisionTransformerModel

    if config.discrete:
        raise ValueError("Hugging Face's Decision Transformer has no discrete actions")

    model: nn.Module = exported(
        "dt", config, published_dt.to_hf, lambda out: from_pretrained(DecisionTransformerModel, out, kind)
    )
    return model


def _nanodt(config: DecisionTransformerConfig) -> nn.Module:
    from nanodt.model import DecisionTransformer
    from nanodt.model import DecisionTransformerConfig as NanoConfig

    if config.discrete or len(config.state_shape) != 1:
        raise ValueError("nanodt's training of discrete actions and its images are not compared")
    model: nn.Module = DecisionTransformer(
        NanoConfig(
            n_layer=config.depth,
            n_head=config.num_heads,
            n_embd=config.embed_dim,
            dropout=config.dropout,
            bias=True,
            K=config.context_length,
            max_ep_len=config.max_episode_length,
            state_dim=config.state_shape[0],
            act_dim=config.action_dim,
            act_discrete=False,
            act_vocab_size=1,
            act_tanh=config.action_tanh,
            tanh_embeddings=False,
        )
    )
    return model


class _Policy:
    """Their model on the last K steps, as their documentation has it, for several environments at once.

    Args:
        ask: calls the model.
        model: theirs.
        config: ours.
        return_scale: by which returns are divided.
        setting: device and dtype.
    """

    def __init__(
        self, ask: Any, model: nn.Module, config: DecisionTransformerConfig, return_scale: float, setting: Setting
    ) -> None:
        self.ask, self.model, self.config = ask, model, config
        self.return_scale = return_scale
        self.setting = setting

    def _tensor(self, values: Any) -> Tensor:
        return torch.as_tensor(values).to(self.setting.device, self.setting.dtype)

    def reset(self, targets: np.ndarray) -> None:
        """Begin episodes."""
        self.states: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.returns = [self._tensor(targets / self.return_scale)]

    def act(self, observation: np.ndarray, reward: np.ndarray | None = None) -> np.ndarray:
        """The actions [B, A] for what is observed now, [B, …], and the rewards [B] of those before."""
        steps = self.config.context_length
        self.states.append(self._tensor(observation))
        if reward is not None:
            self.returns.append(self.returns[-1] - self._tensor(reward / self.return_scale))
        unknown = torch.zeros(len(observation), self.config.action_dim).to(self.states[0])
        now = len(self.states)
        first = max(now - steps, 0)
        window = {
            "state": torch.stack(self.states[-steps:], dim=1),
            "action": torch.stack([*self.actions, unknown][-steps:], dim=1),
            "return": torch.stack(self.returns[-steps:], dim=1),
            "timestep": torch.arange(first, now, device=self.setting.device).expand(len(observation), -1),
        }
        found: Tensor = self.ask(self.model, window)[:, -1]
        self.actions.append(found)
        return found.float().cpu().numpy()
