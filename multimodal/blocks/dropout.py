"""Dropout with a mask that is cheap on CPU."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """`nn.Dropout` whose mask, on CPU, takes 16 random bits a number instead of a Bernoulli draw: half the time.

    The rate is then the nearest multiple of 2⁻¹⁶, by which also the rest is scaled. The bits come from torch's
    generator, so seeds and restored states repeat them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [...] with some numbers zeroed and the others scaled up, of any shape."""
        if not self.training:  # most calls, and in decoding even torch's own check takes its time
            return x
        dropped = round(self.p * 2**16)
        if not (0 < dropped < 2**16 and x.device.type == "cpu") or torch.compiler.is_compiling():
            return super().forward(x)
        bits = torch.empty(x.numel() // 4 + 1, dtype=torch.int64).random_(-(2**63), None)
        kept = bits.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 2**15
        return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))
