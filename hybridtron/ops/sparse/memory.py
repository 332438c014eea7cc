"""The state of sparse attention: the keys that a document's next row still needs.

In sparse attention, a query sees only the keys that rules select: the recent, first or strided keys of the document,
the last keys in the query's hash bin, or the keys with the best scores (`reference`). A row is a sequence in the batch,
and a document may be longer than a row. The memory after a row holds those keys of the row's last document that a query
in a later row can still see. Each key is stored with its value, its position in the document and its score. With the
memory, a document that is divided into rows gives the same results as in a single row. Hash bins are not remembered.
They are computed again from the keys, because the hash may change with the next training step.

Legend: R rows (a row for each sequence in the batch and each head group), L tokens in a row, M slots in the memory,
S = M + L available keys, N key size, P value size, C best keys.
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
    """Remembered keys in text order, preceded by empty slots.

    places_RM holds the tokens' positions in their document, counted from 1; it is 0 for an empty slot. length_R holds
    the document's token count so far.
    """

    keys_RMN: Tensor
    values_RMP: Tensor
    places_RM: Tensor
    length_R: Tensor
    scores_RM: Tensor | None = None


class SparseKeys(NamedTuple):
    """All available keys: the remembered keys, then the row's own keys.

    documents_RS holds the index of each token's document in the row; it is -1 for an empty slot in the memory.
    places_RS holds each token's position in its document, counted from 0 (but `SparseMemory` counts from 1).
    """

    keys_RSN: Tensor
    values_RSP: Tensor
    documents_RS: Tensor
    places_RS: Tensor
    scores_RS: Tensor | None = None


def joined(memory: SparseMemory | None, own: SparseKeys) -> SparseKeys:
    """Return the remembered keys, followed by the row's own keys.

    The row's first document continues the memory's document, so the positions of its tokens are increased.
    """
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
    """Merge the memories from consecutive ranges of a document's tokens, and put empty slots first.

    `length_R` counts the document's tokens up to the last range's end.
    """
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
    """Return the memory after a row: the keys from the row's last document that later queries can see.

    The memory has `slots` slots; the caller chooses a number that is enough for these keys. `bins_RS` are the keys'
    bins, or None.
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
    """Return the entries of every row at the indices `order_RM`, which must be distinct within a row."""
    return _Picked.apply(x_RS, order_RM)  # type: ignore[return-value]


class _Picked(torch.autograd.Function):
    """Autograd function that gathers entries; unlike torch's `gather`, it saves only the indices for backward."""

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
    """Expand indices (R, M) over the further axes of x, as torch's `gather` requires."""
    index = order_RM.view(*order_RM.shape, *[1] * (x_RS.dim() - 2))
    return index.expand(*order_RM.shape, *x_RS.shape[2:])


def _needed(budget: Budget, at_hand: SparseKeys, bins_RS: Tensor | None) -> Tensor:
    """Return a mask (R, S) of the keys that a later query in the last document can see."""
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
    """Return for each token the number of later tokens in its class, (R, S)."""
    total = class_RS.shape[1]
    index_S = torch.arange(total, device=class_RS.device)
    sorted_RS, order_RS = (class_RS * total + index_S).sort(dim=1)
    end_RS = torch.searchsorted(sorted_RS, (class_RS + 1) * total)
    return end_RS - 1 - inverse(order_RS)
