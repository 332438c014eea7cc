"""One residual sub-layer: x + mixer(norm(x)).

The sum is left to the sub-layer that comes next, which makes it in one op with its own norm. So what goes from one to
the next is the stream x, and what is not yet added to it. x may be wider than what a sub-layer computes in and adds:
its norm is as narrow as the norm's weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import State, build_mixer
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.parallel.linear import TensorGroup


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(RMSNormInputs(x, self.weight, self.eps))


class StreamNorm(RMSNorm):
    """The same of a stream to which something is added before, in one op: the stream then, and its norm."""

    def forward(self, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        if added is None:
            return x, super().forward(x)
        return add_rms_norm(AddRMSNormInputs(x, added, self.weight, self.eps))


class ResidualOut(NamedTuple):
    """The stream that the sub-layer read, what it adds to it, its new state, and its auxiliary losses."""

    x_LBD: Tensor
    added_LBD: Tensor
    state: State
    aux: dict[str, Tensor]


class Residual(nn.Module):
    """A pre-norm residual sub-layer around any mixer."""

    def __init__(self, spec: MixerSpec, sizes: ModelSizes, norm_eps: float, tensor: TensorGroup) -> None:
        super().__init__()
        self.norm = StreamNorm(sizes.width, norm_eps)
        self.mixer = build_mixer(spec, sizes, tensor)

    def forward(self, x_LBD: Tensor, added_LBD: Tensor | None, state: State | None, seq: SeqInfo) -> ResidualOut:
        """`added_LBD` is what the sub-layer before adds to the stream; None, where `x_LBD` is all of it."""
        x_LBD, normed_LBD = self.norm(x_LBD, added_LBD)
        return ResidualOut(x_LBD, *self.mixer(normed_LBD, state, seq))
