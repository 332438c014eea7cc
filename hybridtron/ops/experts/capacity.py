"""Capacity of experts: an expert computes at most C of the choices in a row (sequence), those of the earliest tokens.

    rank[t, k] = number of earlier tokens in t's row that chose the same expert
    kept[t, k] = rank[t, k] < C;   other choices are dropped

A choice is a pair of a token and one of its K experts. Only earlier tokens of the same row decide whether a choice is
kept. Later tokens, other rows and the parallel layout have no influence. An expert then gets at most C rows from each
row of tokens. So ranks that divide the experts can exchange messages of a fixed size, with S slots for each expert and
each row:

    place[t, k] = (e B + b) S + rank[t, k],   or E B S, behind all slots, if the choice is dropped

Legend: T = L B tokens in the order of positions, B rows, E experts, K experts per token, S slots, N places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.experts.parts import expert_order
from hybridtron.ops.experts.permutation import ExpertOrder, ExpertOrderInputs
from hybridtron.ops.experts.routing import loads_of


class RowRanks(NamedTuple):
    """Each choice's rank among the choices of its expert in its row, and each row's loads.

    ranks_TK   number of earlier tokens in the row that chose the same expert, in int64
    loads_BE   number of tokens in each row that chose each expert, in int64
    """

    ranks_TK: Tensor
    loads_BE: Tensor


def row_ranks(experts_TK: Tensor, rows: int, experts: int) -> RowRanks:
    """Return the choices' ranks and the loads for `rows` rows, without waiting for the device."""
    key_TK = rows_of(experts_TK, rows) * experts + experts_TK
    loads = loads_of(key_TK, rows * experts)
    order = expert_order(ExpertOrderInputs(key_TK, loads))
    first = order.ends_E - loads
    return RowRanks(order.place_TK - first[key_TK], loads.view(rows, experts))


def rows_of(experts_TK: Tensor, rows: int) -> Tensor:
    """Return the index of each token's row (T, 1)."""
    return (torch.arange(len(experts_TK), device=experts_TK.device) % rows)[:, None]


def slot_order(experts_TK: Tensor, ranks_TK: Tensor, kept_TK: Tensor, sizes: tuple[int, int, int]) -> ExpertOrder:
    """Sort the choices by slot. All dropped choices get the place behind the last slot.

    sizes: B rows, E experts, S slots of each expert for each row
    """
    rows, experts, slots = sizes
    count = rows * experts * slots
    place_TK = (experts_TK * rows + rows_of(experts_TK, rows)) * slots + ranks_TK
    place_TK = torch.where(kept_TK, place_TK, count)
    choice_N = torch.arange(place_TK.numel(), device=place_TK.device)
    source_N = torch.full((count + 1,), place_TK.numel(), device=place_TK.device)
    source_N = source_N.scatter(0, place_TK.flatten(), choice_N)
    source_N[count:].fill_(place_TK.numel())  # an assignment of a number would copy it from the host
    ends_E = torch.arange(1, experts + 1, dtype=torch.int32, device=place_TK.device) * (rows * slots)
    return ExpertOrder(source_N, place_TK, ends_E, has_slots=True)
