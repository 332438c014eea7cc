"""One residual sub-layer: x + mixer(norm(x))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtron.data.batch import SeqInfo
from hybridtron.mixers import MIXERS
from hybridtron.mixers.base import Out, State
from hybridtron.ops.norm_rope import rms_norm
from hybridtron.parallel.linear import TensorGroup
from hybridtron.specs.base import MixerSpec, ModelSizes


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Residual(nn.Module):
    """A pre-norm residual sub-layer around any mixer."""

    def __init__(self, spec: MixerSpec, sizes: ModelSizes, norm_eps: float, tensor: TensorGroup) -> None:
        super().__init__()
        self.norm = RMSNorm(sizes.width, norm_eps)
        self.mixer = MIXERS[spec.kind](spec, sizes, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        y_LBD, state, aux = self.mixer(self.norm(x_LBD), state, seq)
        return Out(x_LBD + y_LBD, state, aux)
