"""What is measured of a policy: returns in an environment, and how well it is calibrated without one."""

import torch
from torch import Tensor
from torchmetrics import Metric


class AchievedReturn(Metric):
    """The mean return of episodes that were rolled out; absent where there were none."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, returns: Tensor) -> None:
        self.total += returns.double().sum()
        self.count += len(returns)

    def compute(self) -> dict[str, Tensor]:
        return {"return": (self.total / self.count).float()} if self.count else {}


class ReturnCalibration(Metric):
    """Pearson's correlation of the returns to go under which a model finds actions most likely with the true ones.

    1 = what it is asked for is what it does; 0 = it does not heed the return. Absent where it cannot be told.
    """

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(6, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, inferred: Tensor, true: Tensor) -> None:
        x, y = inferred.double(), true.double()
        self.sums += torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y]).sum(dim=1)

    def compute(self) -> dict[str, Tensor]:
        n, x, y, xx, yy, xy = self.sums
        spread = (n * xx - x * x) * (n * yy - y * y)
        if not spread > 1e-12 * n**4:
            return {}
        return {"return_calibration": ((n * xy - x * y) / spread.sqrt()).float()}
