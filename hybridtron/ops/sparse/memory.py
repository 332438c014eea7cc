"""The state of sparse attention: remembered keys, so that a document cut into rows gives the results of the uncut one.

The memory has the keys that a later query can see under a budget, each with its value, its place and its score: the
last ones, the first ones, the last ones at the stride, the last ones of every bin, the best ones. No later query sees
any other key. Bins are computed from the keys again, because the hash may change with the next training step.

Legend as in `reference`; M slots of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.sparse.parts import best_of, inverse
from hybridtron.ops.sparse.reference import Budget


class SparseMemory(NamedTuple):
    """Remembered keys in the order of the text, with empty slots before them.

    places_RM: the tokens' positions in their document, counted from 1; 0 for an empty slot. length_R: the number of the
    document's tokens so far.
    """

    keys_RMN: Tensor
    values_RMP: Tensor
    places_RM: Tensor
    length_R: Tensor
    scores_RM: Tensor | None = None


class SparseKeys(NamedTuple):
    """All available keys: the remembered ones, then the row's own.

    documents_RS: the number of each token's document in the row; -1 for an empty slot of the memory. places_RS: each
    token's position in its document, counted from 0.
    """

    keys_RSN: Tensor
    values_RSP: Tensor
    documents_RS: Tensor
    places_RS: Tensor
    scores_RS: Tensor | None = None


def joined(memory: SparseMemory | None, own: SparseKeys) -> SparseKeys:
    """Put the row's keys behind the remembered ones; its first document continues where the memory ends."""
    if memory is None:
        return own
    first_RL = own.documents_RS == own.documents_RS[:, :1]
    places_RL = own.places_RS + torch.where(first_RL, memory.length_R[:, None], 0)
    documents_RM = torch.where(memory.places_RM > 0, own.documents_RS[:, :1], -1)
    scores = None
    if own.scores_RS is not None and memory.scores_RM is not None:
        scores = torch.cat((memory.scores_RM.to(own.scores_RS.dtype), own.scores_RS), dim=1)
    return SparseKeys(
        torch.cat((memory.keys_RMN, own.keys_RSN), dim=1),
        torch.cat((memory.values_RMP, own.values_RSP), dim=1),
        torch.cat((documents_RM, own.documents_RS), dim=1),
        torch.cat((memory.places_RM - 1, places_RL), dim=1),
        scores,
    )


def merged(memories: Sequence[SparseMemory], length_R: Tensor) -> SparseMemory:
    """Merge memories from consecutive parts of a document that has `length_R` tokens so far, empty slots first."""
    places_RM = torch.cat([memory.places_RM for memory in memories], dim=1)
    order_RM = (places_RM > 0).int().argsort(dim=1, stable=True)

    def in_order(parts: Sequence[Tensor]) -> Tensor:
        return picked(torch.cat(list(parts), dim=1), order_RM)

    scores = [memory.scores_RM for memory in memories if memory.scores_RM is not None]
    keys, values = ([getattr(memory, name) for memory in memories] for name in ("keys_RMN", "values_RMP"))
    if len(scores) == len(memories):
        of_scores = in_order(scores)
    else:
        of_scores = None
    return SparseMemory(in_order(keys), in_order(values), places_RM.gather(1, order_RM), length_R, of_scores)


def remember(budget: Budget, at_hand: SparseKeys, bins_RS: Tensor | None, slots: int) -> SparseMemory:
    """Return the memory after a row: the keys of its last document that later queries can see.

    It has `slots` slots, which must be enough for these keys.
    """
    keys, values, _, places_RS, scores = at_hand
    needed_RS = _needed(budget, at_hand, bins_RS)
    order_RM = needed_RS.int().argsort(dim=1, stable=True)[:, -slots:]
    filled_RM = needed_RS.gather(1, order_RM)
    missing = slots - order_RM.shape[1]

    def taken(x_RS: Tensor) -> Tensor:
        shape = (*order_RM.shape, *[1] * (x_RS.dim() - 2))
        kept = torch.where(filled_RM.view(shape), picked(x_RS, order_RM), torch.zeros((), dtype=x_RS.dtype))
        return F.pad(kept, (*[0, 0] * (x_RS.dim() - 2), missing, 0))

    of_scores = None if scores is None else taken(scores)
    return SparseMemory(taken(keys), taken(values), taken(places_RS + 1), places_RS[:, -1] + 1, of_scores)


def picked(x_RS: Tensor, order_RM: Tensor) -> Tensor:
    """Return the entries of every row at these indices, which must differ from each other."""
    return _Picked.apply(x_RS, order_RM)  # type: ignore[return-value]


class _Picked(torch.autograd.Function):
    """Autograd function that gathers entries; unlike torch's `gather`, it does not keep its input for backward."""

    @staticmethod
    def forward(ctx: Any, x_RS: Tensor, order_RM: Tensor) -> Tensor:
        ctx.save_for_backward(order_RM)
        ctx.entries = x_RS.shape[1]
        return x_RS.gather(1, _over(order_RM, x_RS))

    @staticmethod
    def backward(ctx: Any, grad_RM: Tensor) -> tuple[Tensor, None]:
        (order_RM,) = ctx.saved_tensors
        grad_RS = grad_RM.new_zeros(len(grad_RM), ctx.entries, *grad_RM.shape[2:])
        return grad_RS.scatter_(1, _over(order_RM, grad_RM), grad_RM), None


def _over(order_RM: Tensor, x_RS: Tensor) -> Tensor:
    """Expand an index of entries over their channels."""
    index = order_RM.view(*order_RM.shape, *[1] * (x_RS.dim() - 2))
    return index.expand(*order_RM.shape, *x_RS.shape[2:])


def _needed(budget: Budget, at_hand: SparseKeys, bins_RS: Tensor | None) -> Tensor:
    """Mark the keys that a later query in the last document can see."""
    documents_RS = at_hand.documents_RS
    places_RS = at_hand.places_RS
    last_RS = documents_RS == documents_RS[:, -1:]
    needed_RS = (places_RS < budget.first) | (_later(documents_RS) < budget.recent - 1)
    if budget.strided:
        at_stride_RS = (places_RS + 1) % budget.stride == 0
        later_RS = _later(torch.where(at_stride_RS, documents_RS, -1))
        needed_RS |= at_stride_RS & (later_RS < budget.strided)
    if bins_RS is not None:
        needed_RS |= _later(torch.where(last_RS, bins_RS, -1)) < budget.bin
    if at_hand.scores_RS is not None:
        best_RC = best_of(documents_RS, at_hand.scores_RS, budget.best)
        needed_RS |= torch.zeros_like(last_RS).scatter_(1, best_RC, True)
    return needed_RS & last_RS


def _later(class_RS: Tensor) -> Tensor:
    """Count the later tokens in each token's class."""
    total = class_RS.shape[1]
    index_S = torch.arange(total, device=class_RS.device)
    sorted_RS, order_RS = (class_RS * total + index_S).sort(dim=1)
    end_RS = torch.searchsorted(sorted_RS, (class_RS + 1) * total)
    return end_RS - 1 - inverse(order_RS)
