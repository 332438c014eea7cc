"""RMSNorm as a module, for the residual stream and for mixers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtron.ops.norm import RMSNormInputs, rms_norm


class PlainRMSNorm(nn.Module):
    """Root-mean-square norm without a learned scale."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(RMSNormInputs(x, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device), self.eps))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(RMSNormInputs(x, self.weight, self.eps))
