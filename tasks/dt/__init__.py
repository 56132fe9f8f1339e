"""Offline reinforcement learning with a Decision Transformer."""

from tasks.registry import FORMATS, Format, Link, Task, Verb

TASK = Task(
    name="dt",
    help="learn from recorded episodes to act for a return that is asked for, with a Decision Transformer",
    module="tasks.dt.task:DTModule",
    data="tasks.dt.data:EpisodeData",
    config="dt.yaml",
    metric="return",
    mode="max",
    example="tasks.dt.example:example",
    links=(
        Link(source="model.context_length", target="data.context_length"),
        Link(source="data.state_shape", target="model.state_shape", on="instantiate"),
        Link(source="data.action_dim", target="model.action_dim", on="instantiate"),
        Link(source="data.discrete", target="model.discrete", on="instantiate"),
        Link(source="data.longest", target="model.max_episode_length", on="instantiate"),
    ),
    verbs=(
        Verb(
            name="rollout",
            help="act in an environment, and compare the returns that are asked for with those achieved",
            module="tasks.dt.rollout",
        ),
    ),
    formats=(
        *FORMATS,
        Format(
            name="huggingface",
            help="a folder for DecisionTransformerModel.from_pretrained('OUT')",
            write="multimodal.pretrained.published_dt:to_hf",
        ),
        Format(
            name="original",
            help="a state dict for the model of kzl/decision-transformer",
            write="multimodal.pretrained.published_dt:to_original",
            suffix=".pt",
        ),
    ),
    extra="rl",
    benchmark="tasks.dt.bench:workloads",
    peers="tasks.dt.peers:peers",
)
