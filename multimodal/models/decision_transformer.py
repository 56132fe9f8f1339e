"""Decision Transformer ("Decision Transformer: Reinforcement Learning via Sequence Modeling", Chen et al. 2021).

B batch, T steps, n tokens a step, N = n·T tokens, D embed_dim, A action_dim, S state_dim, (C, H, W) an image that is a
state
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from multimodal.attention import StackCache
from multimodal.blocks import Stack, StackConfig
from multimodal.blocks.dropout import Dropout
from multimodal.blocks.embed import ImageEmbed
from multimodal.blocks.init import InitScheme, init_linear
from multimodal.blocks.mlp import Activation
from multimodal.blocks.residual import build_norm


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerConfig(StackConfig):
    """A Decision Transformer: the stack's fields and what is around it. The size is that of the paper's Gym tasks."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = StackConfig.TRAINING_ONLY | {"embed_dropout"}

    embed_dim: int = 128
    """Width of the tokens."""
    depth: int = 3
    """Number of blocks."""
    num_heads: int = 1
    """Attention heads."""
    activation: Activation = "relu"
    """Activation of the MLP."""
    dropout: float = 0.1
    """Dropout on each residual branch."""
    attention_dropout: float = 0.1
    """Dropout on the attention weights; it leaves the fused path on CPU."""
    embed_dropout: float = 0.1
    """Dropout on the embedded tokens."""
    init: InitScheme = "gpt2"
    """Family whose initialisation is used."""
    state_shape: tuple[int, ...] = (17,)
    """Shape of a state: a number of values, or channels, height and width of an image."""
    action_dim: int = 4
    """Numbers in an action; with discrete actions, how many there are."""
    discrete: bool = False
    """Actions are one of action_dim kinds rather than vectors."""
    action_tanh: bool = True
    """Vectors of actions lie between -1 and 1, by a tanh; does nothing for discrete ones."""
    returns: bool = True
    """Conditioned on the return to go; False leaves these tokens out, which is behaviour cloning by the same stack."""
    context_length: int = 20
    """Steps that a policy sees: the paper's K."""
    max_episode_length: int = 1000
    """Steps of the longest episode: rows of the table of timesteps."""
    auxiliary: bool = False
    """Heads for the next state and the return that is left then, as published code has; the paper trains neither."""
    token_bias: bool = False
    """A learned vector added to every token (the one row that Hugging Face's model uses of its position table)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = len(self.state_shape) in (1, 3) and all(size >= 1 for size in self.state_shape)
        self._expect("state_shape", sizes, "one size, or channels, height and width")
        self._expect("action_dim", self.action_dim >= (2 if self.discrete else 1), "at least 1, or 2 if discrete")
        self._expect("context_length", self.context_length >= 1, "at least 1")
        self._expect("max_episode_length", self.max_episode_length >= 1, "at least 1")
        self._expect("embed_dropout", 0 <= self.embed_dropout < 1, "a rate in [0, 1)")

    @property
    def tokens_per_step(self) -> int:
        """Return, state and action; without returns two."""
        return 2 + self.returns


class DecisionTransformerOutput(NamedTuple):
    """What the model predicts of each step."""

    actions: Tensor
    """[B, T, A] from the state's token: the action, or logits of the discrete ones."""
    states: Tensor | None
    """[B, T, S] from the action's token: the next state; None for images, or without `auxiliary`."""
    returns: Tensor | None
    """[B, T] from the action's token: the return that is left after it; None without returns or `auxiliary`."""


class DecisionTransformer(nn.Module):
    """Returns to go, states and actions as one causal sequence: R, s, a, R, s, a, … (section 3).

    Time is told by an embedding of the step in the episode, added to the three tokens of that step.
    """

    def __init__(self, config: DecisionTransformerConfig) -> None:
        super().__init__()
        self.config = config
        dim, vector = config.embed_dim, len(config.state_shape) == 1
        self.embed_timestep = nn.Embedding(config.max_episode_length, dim)
        self.embed_return = nn.Linear(1, dim) if config.returns else None
        self.embed_state: nn.Module = nn.Linear(config.state_shape[0], dim) if vector else _image_embed(config)
        self.embed_action = nn.Linear(config.action_dim, dim)
        self.embed_norm = build_norm(config.norm, dim, config.norm_eps)
        self.token_bias = nn.Parameter(torch.zeros(dim)) if config.token_bias else None
        self.embed_dropout = Dropout(config.embed_dropout)
        self.encoder = Stack(config, causal=True)
        self.predict_action = nn.Linear(dim, config.action_dim)
        auxiliary = config.auxiliary
        self.predict_state = nn.Linear(dim, config.state_shape[0]) if auxiliary and vector else None
        self.predict_return = nn.Linear(dim, 1) if auxiliary and config.returns else None
        nn.init.normal_(self.embed_timestep.weight, std=0.02)
        heads = (self.predict_action, self.predict_state, self.predict_return)
        for linear in (self.embed_return, self.embed_state, self.embed_action, *heads):
            if isinstance(linear, nn.Linear):
                init_linear(linear, 0.02)

    def embed(self, states: Tensor, actions: Tensor, timesteps: Tensor, returns: Tensor | None = None) -> Tensor:
        """The tokens [B, N, D] that enter the first block; see `forward`.

        `actions` may lack that of the last step, whose token then is left out: what a policy knows when it is to act.
        """
        if (returns is None) == self.config.returns:
            raise ValueError(
                f"returns are {'missing' if returns is None else 'given'}, but the model's config is not so"
            )
        pending = states.shape[1] - actions.shape[1]
        if self.config.discrete:
            actions = one_hot(actions, self.config.action_dim)
        actions = pad(actions.to(self.embed_action.weight.dtype), (0, 0, 0, pending))
        parts = [self.embed_state(states), self.embed_action(actions)]
        if self.embed_return is not None and returns is not None:
            parts.insert(0, self.embed_return(returns[..., None]))
        tokens = torch.stack(parts, dim=2) + self.embed_timestep(timesteps)[:, :, None]  # [B, T, n, D]
        tokens = self.embed_norm(tokens).flatten(1, 2)
        if self.token_bias is not None:
            tokens = tokens + self.token_bias
        return self.embed_dropout(tokens[:, : tokens.shape[1] - pending])

    @overload
    def forward(
        self, states: Tensor, actions: Tensor, timesteps: Tensor, returns: Tensor | None = None,
        valid: Tensor | None = None, *, auxiliary: Literal[True],
    ) -> DecisionTransformerOutput: ...  # fmt: skip

    @overload
    def forward(
        self, states: Tensor, actions: Tensor, timesteps: Tensor, returns: Tensor | None = None,
        valid: Tensor | None = None, *, auxiliary: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        returns: Tensor | None = None,
        valid: Tensor | None = None,
        *,
        auxiliary: bool = False,
    ) -> Tensor | DecisionTransformerOutput:
        """Predict the action of each step from its return to go and state, and from the steps before it.

        Args:
            states: normalised, [B, T, S] or [B, T, C, H, W].
            actions: [B, T, A], or int64 [B, T] if discrete; that of a step is seen by later steps alone. They may lack
                the last step's.
            timesteps: the step's number in its episode, int64 [B, T], from 0 up to max_episode_length - 1.
            returns: the sum of the rewards from this step to the end, scaled, [B, T]; None without `config.returns`.
            valid: bool [B, T], False = padding, wherever it is; None where there is none before a step that counts.
            auxiliary: return the other heads' predictions as well.

        Returns:
            Actions [B, T, A], or logits of the discrete ones.
        """
        tokens = self.embed(states, actions, timesteps, returns)
        count = self.config.tokens_per_step
        key_mask = None if valid is None else valid.repeat_interleave(count, dim=1)[:, : tokens.shape[1]]
        at_states = slice(count - 2, None, count)
        if not auxiliary:  # the last block then computes the states' tokens alone
            return self.act(self.encoder(tokens, key_mask=key_mask, only=at_states).last)
        tokens = self.encoder(tokens, key_mask=key_mask).last
        after = tokens[:, count - 1 :: count]
        return DecisionTransformerOutput(
            self.act(tokens[:, at_states]),
            None if self.predict_state is None else self.predict_state(after),
            None if self.predict_return is None else self.predict_return(after)[..., 0],
        )

    def act(self, x: Tensor) -> Tensor:
        """The actions [..., A] of states' tokens x [..., D] that have left the encoder."""
        actions = self.predict_action(x)
        return actions.tanh() if self.config.action_tanh and not self.config.discrete else actions

    def next_action(self, tokens: Tensor, cache: StackCache | None = None, mask: Tensor | None = None) -> Tensor:
        """The action [B, A] that follows tokens [B, N, D], of which the last is a state's.

        With a cache of the tokens before these, and, if it is static, a mask [1, 1, N, Nk] of what is filled of it:
        until a window of steps slides, which alters what they have seen.
        """
        return self.act(self.encoder(tokens, mask=mask, cache=cache, only=slice(-1, None)).last[:, 0])

    def no_weight_decay(self) -> set[str]:
        """Parameters besides norms and biases that take no weight decay."""
        return {"embed_timestep.weight"}


def _image_embed(config: DecisionTransformerConfig) -> nn.Module:
    channels, height, width = config.state_shape
    return ImageEmbed((height, width), channels, config.embed_dim)
