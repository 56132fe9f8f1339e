"""The Decision Transformer's training step and roll-out beside Hugging Face's model, interleaved in one process.

    python benchmarks/dt_vs_hf.py [--rounds 15]

Both have the same weights, at the size of the paper's Gym tasks: 20 steps, width 128, 3 layers, 1 head, batches of 64,
dropout of 0.1 everywhere, gradients clipped at 0.25, and the same optimizer (fused AdamW). Hugging Face's attention is
fused or plain, whichever is faster. In a roll-out it runs anew on the last 20 steps each time, without padding; all
actions are compared. More than 1 is faster than Hugging Face.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import origin, write_section
from torch import Tensor, nn
from transformers import DecisionTransformerConfig, DecisionTransformerModel
from vit_vs_timm import measure

from multimodal import pretrained
from multimodal.models.decision_transformer import DecisionTransformer
from tasks.dt.policy import Policy
from tasks.dt.preprocess import TrajectoryPreprocess

STATE, ACTION, K, BATCH = 11, 3, 20, 64
SLID = 40
"""Steps that are timed once the window slides."""
TARGET = 3600.0
Step = Callable[[], None]
PREPROCESS = TrajectoryPreprocess(
    state_mean=(0.0,) * STATE,
    state_std=(1.0,) * STATE,
    action_low=None,
    action_high=None,
    return_scale=1000.0,
    return_range=(0.0, TARGET),
    max_episode_length=1000,
)


def build() -> tuple[DecisionTransformer, DecisionTransformerModel]:
    """Ours and theirs, with the same weights."""
    fixed = {"vocab_size": 1, "bos_token_id": 0, "eos_token_id": 0}
    theirs = DecisionTransformerModel(
        DecisionTransformerConfig(state_dim=STATE, act_dim=ACTION, max_ep_len=1000, **fixed)
    )
    ours = pretrained.load(theirs).model
    assert isinstance(ours, DecisionTransformer)
    return ours, theirs


def examples() -> dict[str, Tensor]:
    return {
        "states": torch.randn(BATCH, K, STATE),
        "actions": torch.rand(BATCH, K, ACTION) * 2 - 1,
        "returns": torch.rand(BATCH, K) * 3,
        "timesteps": torch.arange(K) + torch.randint(900, (BATCH, 1)),
    }


def actions_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    if isinstance(model, DecisionTransformer):
        return model(**inputs)
    returns = inputs["returns"][..., None]
    given = {name: inputs[name] for name in ("states", "actions", "timesteps")}
    found: Tensor = model(**given, returns_to_go=returns).action_preds
    return found


def train_step(model: nn.Module, inputs: dict[str, Tensor]) -> Step:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)

    def step() -> None:
        loss = (actions_of(model, inputs) - inputs["actions"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    return step


class TheirPolicy:
    """Hugging Face's model on the last steps, as its documentation has it, for several environments at once."""

    def __init__(self, model: DecisionTransformerModel) -> None:
        self.model = model

    def reset(self, targets: np.ndarray) -> None:
        self.states: list[Tensor] = []
        self.actions: list[Tensor] = []
        self.returns = [torch.from_numpy(targets / PREPROCESS.return_scale).float()]

    @torch.inference_mode()
    def act(self, observation: np.ndarray, reward: np.ndarray | None = None) -> np.ndarray:
        self.states.append(torch.from_numpy(PREPROCESS.states(observation)))
        if reward is not None:
            self.returns.append(self.returns[-1] - torch.from_numpy(reward).float() / PREPROCESS.return_scale)
        unknown = torch.zeros(len(observation), ACTION)
        now = len(self.states)
        found = self.model(
            states=torch.stack(self.states[-K:], dim=1),
            actions=torch.stack([*self.actions, unknown][-K:], dim=1),
            returns_to_go=torch.stack(self.returns[-K:], dim=1)[..., None],
            timesteps=torch.arange(max(now - K, 0), now).expand(len(observation), -1),
        ).action_preds[:, -1]
        self.actions.append(found)
        return found.numpy()


def episode(policy: Any, observations: np.ndarray, rewards: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Milliseconds of each step, and the actions."""
    policy.reset(np.full(observations.shape[1], TARGET))
    times, actions = [], []
    for step, observation in enumerate(observations):
        reward = rewards[step - 1] if step else None
        start = time.perf_counter()
        actions.append(policy.act(observation, reward))
        times.append(1000 * (time.perf_counter() - start))
    return times, np.stack(actions)


def roll_outs(ours: DecisionTransformer, theirs: DecisionTransformerModel, count: int, rounds: int) -> list[str]:
    """Rows for steps within the first K, and once the window slides."""
    random = np.random.default_rng(0)
    observations, rewards = random.normal(size=(K + SLID, count, STATE)), random.uniform(0, 4, (K + SLID, count))
    policies = {"ours": Policy(ours.eval(), PREPROCESS), "theirs": TheirPolicy(theirs.eval())}
    times: dict[str, list[list[float]]] = {name: [] for name in policies}
    found = {}
    for index in range(rounds + 1):
        for name in policies if index % 2 else reversed(policies):
            taken, found[name] = episode(policies[name], observations, rewards)
            if index:  # the first warms up
                times[name].append(taken)
        if (worst := np.abs(found["ours"] - found["theirs"]).max()) > 1e-4:
            raise RuntimeError(f"actions differ by {worst:.1e}")
    rows = []
    for part, chosen in ((f"steps 1 to {K}", slice(0, K)), (f"steps {K + 1} to {K + SLID}", slice(K, None))):
        medians = {name: [statistics.mean(one[chosen]) for one in each] for name, each in times.items()}
        ratios = [b / a for a, b in zip(medians["ours"], medians["theirs"], strict=True)]
        a, b = (statistics.median(medians[name]) for name in ("ours", "theirs"))
        rows.append(
            f"| roll-out, {count} at once, {part} | {a:.2f} | {b:.2f} | **{b / a:.2f}** "
            f"| {min(ratios):.2f}–{max(ratios):.2f} | actions within {worst:.0e} |"
        )
    return rows


def fastest(theirs: DecisionTransformerModel, run: Callable[[], None]) -> str:
    """Their attention for this work, set by two timings of each."""
    times = {}
    for name in ("sdpa", "eager"):
        theirs.set_attn_implementation(name)
        run()
        start = time.perf_counter()
        for _ in range(3):
            run()
        times[name] = time.perf_counter() - start
    best = min(times, key=times.__getitem__)
    theirs.set_attn_implementation(best)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    heading = origin("transformers")
    ours, theirs = build()
    inputs = examples()
    with torch.no_grad():
        if (worst := float((actions_of(ours.eval(), inputs) - actions_of(theirs.eval(), inputs)).abs().max())) > 1e-5:
            raise RuntimeError(f"actions differ by {worst:.1e}")
    rows = ["| work | ours, ms | HF, ms | HF / ours | range of rounds | |", "|---|---|---|---|---|---|"]
    for count in (1, 16):
        form = fastest(theirs.eval(), lambda: actions_of(theirs, {name: each[:count] for name, each in inputs.items()}))  # noqa: B023
        rows += [f"{row[:-1]} HF's attention: {form} |" for row in roll_outs(ours, theirs, count, args.rounds)]
    their_step = train_step(theirs, inputs)
    form = fastest(theirs, their_step)
    row = measure(train_step(ours, inputs), their_step, args.rounds)
    rows.append(
        f"| training step, batch {BATCH} | {row.ours:.1f} | {row.theirs:.1f} | **{row.theirs / row.ours:.2f}** "
        f"| {row.low:.2f}–{row.high:.2f} | HF's attention: {form} |"
    )
    print("\n".join(rows))
    text = (__doc__ or "").split("\n\n")[2].splitlines()
    write_section("Decision Transformer beside Hugging Face", [heading, "", *text, "", *rows])


if __name__ == "__main__":
    main()
