"""How a weight is cut over tensor-parallel ranks, and put together again: each part of a fused weight for itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.parallel.linear import TensorGroup
from hybridtron.specs.base import Parameter


def cut(whole: Tensor, parameter: Parameter, tensor: TensorGroup) -> Tensor:
    """This rank's share of a whole weight."""
    axis = parameter.cut_axis(tensor.size)
    if axis is None:
        return whole
    return torch.cat([part.chunk(tensor.size, axis)[tensor.rank] for part in _parts(whole, parameter, axis)], axis)


def join(shares: Sequence[Tensor], parameter: Parameter) -> Tensor:
    """The whole weight from every rank's share, in the order of ranks."""
    axis = parameter.cut_axis(len(shares))
    if axis is None:
        return shares[0]
    pieces = [_parts(share, parameter, axis, len(shares)) for share in shares]
    return torch.cat([torch.cat(part, axis) for part in zip(*pieces, strict=True)], axis)


def _parts(weight: Tensor, parameter: Parameter, axis: int, ranks: int = 1) -> Sequence[Tensor]:
    """The parts of a weight, or of one of so many shares of it, along the axis that is cut."""
    if axis != 0 or not parameter.parts:
        return [weight]
    return weight.split([rows // ranks for _, rows in parameter.parts])
