"""FSDP2: parameters, gradients and optimizer states divided among the processes, checkpoints whole.

`--trainer.strategy fsdp2` shards each block and what is around them (Zhao et al. 2023; torch's `fully_shard`).
"""

from collections.abc import Mapping
from typing import Any

from lightning_fabric.utilities.types import _PATH
from pytorch_lightning.core.optimizer import LightningOptimizer
from pytorch_lightning.strategies import ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from multimodal.blocks import Block
from tasks.errors import did_you_mean

FSDP2 = "fsdp2"
PRECISIONS = ("32-true", "bf16-mixed")


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each block, then the rest; a model that is sharded already stays as it is."""
    if isinstance(model, FSDPModule):
        return
    for parameter in model.parameters():  # weights of convolutions may be in channels-last order, which is not divided
        parameter.data = parameter.data.contiguous()
    for module in [part for part in model.modules() if isinstance(part, Block)]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in ("encode", "decode"):  # which are called by themselves where texts are generated
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def choose_strategy(strategy: Any, ema_decay: float | None) -> Any:
    """What to give to Lightning for --trainer.strategy; its ModelParallelStrategy becomes the one of this file.

    Args:
        strategy: a name, or a strategy.
        ema_decay: decay of the moving average of what is to be trained; None = none.

    Raises:
        ValueError: a strategy that does not exist, or cannot do what is asked for.
    """
    if type(strategy) is ModelParallelStrategy and strategy._tensor_parallel_size in ("auto", 1):
        strategy = FSDP2Strategy()
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    sharding = name.lower().startswith(("fsdp", "modelparallel"))
    if sharding and name.lower() not in (FSDP2, FSDP2Strategy.__name__.lower()):
        raise ValueError(
            f"trainer.strategy is {name}, expected {FSDP2}, which divides data alone and saves whole files"
        )
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and name.lower() not in known:
        raise ValueError(f"trainer.strategy: unknown value {name}: {did_you_mean(name, known)}")
    if sharding and ema_decay is not None:
        raise ValueError(
            f"model.ema_decay is {ema_decay}, but trainer.strategy {FSDP2} cannot average weights that are divided: "
            "expected null"
        )
    return strategy


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's strategy with data parallelism alone, and checkpoints of one whole file, as any other run's.

    Lightning's own numbers the optimizer's states by the order of the model's parameters, a run in one process by
    that of the optimizer's groups: here both are the latter, so that either goes on from the other's.
    """

    strategy_name = FSDP2

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def _configure_launcher(self) -> None:
        """The last that a trainer does when it is built, and the first to know its precision."""
        if self.precision_plugin.precision not in PRECISIONS:
            raise ValueError(
                f"trainer.precision is {self.precision_plugin.precision}, which trainer.strategy {FSDP2} cannot do, "
                f"expected {' or '.join(PRECISIONS)}"
            )
        super()._configure_launcher()

    # Saving: every process takes part in putting a tensor together, the first keeps it.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = inner.state_dict()
        return {**state, "state": {key: self._whole(values) for key, values in state["state"].items()}}

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        whole = {}
        for name, value in tensors.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            whole[name] = full.cpu() if self.is_global_zero and isinstance(full, Tensor) else None
        return whole

    # Loading: every process reads the file and keeps its part.

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path), weights_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {name: _like(own.get(name), value) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            own = dict(zip(numbers, parameters, strict=True))
            state = {
                number: {name: _like(own[number], value) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _like(own: Tensor | None, value: Any) -> Any:
    """A whole tensor, divided as a parameter of its shape is; others as they are."""
    if not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


StrategyRegistry.register(FSDP2, FSDP2Strategy, description="FSDP2 over all processes")
