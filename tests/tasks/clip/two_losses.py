"""What test_losses.py asks two processes: `torchrun --nproc_per_node 2 -m tests.tasks.clip.two_losses FILE`."""

import sys
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from multimodal.models.clip import CLIPOutput
from tasks.clip.losses import LossKind, pair_loss

IMAGE_ID = torch.tensor([0, 1, 1, 3, 4, 0, 6, 7])
CAPTION_ID = torch.tensor([0, 1, 2, 3, 4, 5, 3, 7])
"""Two captions of an image, and equal captions: within a process and across the two."""


class Towers(nn.Module):
    """Two projections in place of the towers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)
        self.scale, self.bias = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, images: Tensor, texts: Tensor) -> CLIPOutput:
        features = (nn.functional.normalize(x, dim=-1) for x in (self.image(images), self.text(texts)))
        return CLIPOutput(*features, self.scale.exp(), self.bias)


def inputs() -> tuple[Tensor, Tensor]:
    """Eight pairs."""
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 7)


def step(model: nn.Module, part: slice, kind: LossKind, *, local: bool, world_size: int) -> Tensor:
    """The loss of some of the pairs, with its gradients in the model."""
    output = model(*(x[part] for x in inputs()))
    loss = pair_loss(output, IMAGE_ID[part], CAPTION_ID[part], kind=kind, local=local, world_size=world_size)
    loss.backward()
    return loss.detach()


def error(kind: LossKind, local: bool) -> float:
    """Largest difference of loss and gradients from those of one process, over max(1, largest)."""
    whole, rank = Towers(), dist.get_rank()
    expected = step(whole, slice(None), kind, local=False, world_size=1)
    divided = DistributedDataParallel(Towers())
    found = step(divided, slice(rank * 4, rank * 4 + 4), kind, local=local, world_size=2)
    dist.all_reduce(found)
    pairs = [(found / 2, expected)]
    for a, b in zip(divided.parameters(), whole.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        pairs.append((a.grad, b.grad))
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    errors = [f"{kind} {local} {error(kind, local)}" for kind in get_args(LossKind) for local in (False, True)]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text("\n".join(errors))
    dist.destroy_process_group()
