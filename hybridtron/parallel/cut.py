"""How weights and states are cut over tensor-parallel ranks, and put together again; fused parts each for itself.

What a rank holds of a tensor are runs of entries along one axis; laid side by side they are its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter, StatePart
from hybridtron.parallel.linear import TensorGroup


def cut(whole: Tensor, parameter: Parameter, tensor: TensorGroup) -> Tensor:
    """This rank's share of a whole weight."""
    axis = parameter.cut_axis(tensor.size)
    return whole if axis is None else _taken(whole, axis, held_runs(parameter, tensor))


def join(shares: Sequence[Tensor], parameter: Parameter) -> Tensor:
    """The whole weight from every rank's share, in the order of ranks."""
    axis = parameter.cut_axis(len(shares))
    if axis is None:
        return shares[0]
    whole = shares[0].new_empty(parameter.shape)
    for rank, share in enumerate(shares):
        at = 0
        for run in held_runs(parameter, TensorGroup(len(shares), rank)):
            whole.narrow(axis, run.start, len(run)).copy_(share.narrow(axis, at, len(run)))
            at += len(run)
    return whole


def share_of_lanes(whole: Tensor, part: StatePart, tensor: TensorGroup) -> Tensor:
    """This rank's share of one part of the states of some lanes, which stand along the first axis."""
    axis = part.cut_axis(tensor.size)
    return whole if axis is None else _taken(whole, axis + 1, held_runs(part, tensor))


def held_runs(cuttable: Parameter | StatePart, tensor: TensorGroup) -> list[range]:
    """The runs along the cut axis that a rank holds, in its own order."""
    if isinstance(cuttable, StatePart) and cuttable.users is not None:
        used = tensor.groups_used(cuttable.users, *cuttable.pieces)
        return [range(used.start, used.stop)] if isinstance(used, slice) else [range(h, h + 1) for h in used]
    runs, start = [], 0
    for size in cuttable.pieces:
        share = size // tensor.size
        runs.append(range(start + tensor.rank * share, start + (tensor.rank + 1) * share))
        start += size
    return runs


def _taken(whole: Tensor, axis: int, runs: Sequence[range]) -> Tensor:
    return torch.cat([whole.narrow(axis, run.start, len(run)) for run in runs], axis)
