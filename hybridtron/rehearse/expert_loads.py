"""Chooses the loads of experts in a rehearsal, which has no scores to route by: even loads, or more on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.ops.experts import Routing
from hybridtron.parallel import experts
from hybridtron.parallel.experts import RowCounts
from hybridtron.parallel.mesh import RankGroup
from hybridtron.rehearse.events import report_wait


@contextmanager
def chosen_loads(imbalance: float = 1.0) -> Iterator[None]:
    """Make ranks that divide the experts exchange chosen numbers of rows, while the block runs.

    imbalance: rows that this rank's experts get, divided by the rows that they would get with even loads. All ranks
        send this rank equally many rows, and divide their other rows evenly among the other ranks
    """

    def exchanged_loads(routing: Routing, ranks: RankGroup) -> tuple[Tensor, RowCounts]:
        """Replace `experts.exchanged_loads`: count its message and its wait, and return the chosen numbers of rows."""
        sent_RE = routing.loads_E.view(ranks.size, -1)
        received_RE = torch.empty_like(sent_RE)
        dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=ranks.group)
        report_wait("tolist")
        return received_RE, row_counts(routing.experts_TK.numel(), ranks, imbalance)

    exchanged = experts.exchanged_loads
    experts.exchanged_loads = exchanged_loads
    try:
        yield
    finally:
        experts.exchanged_loads = exchanged


def row_counts(choices: int, ranks: RankGroup, imbalance: float) -> RowCounts:
    """Return the numbers of rows that this rank sends and receives, if each rank has equally many choices."""
    even, rest = divmod(choices, ranks.size)
    rows = [even + (rank < rest) for rank in range(ranks.size)]
    if imbalance == 1.0 or ranks.size == 1:
        return RowCounts(rows, rows, ranks.group)
    here = min(round(imbalance * choices / ranks.size), choices)
    others, left = divmod(choices - here, ranks.size - 1)
    sent = [others + (rank < left) for rank in range(ranks.size - 1)]
    sent.insert(ranks.rank, here)
    return RowCounts(sent, [here] * ranks.size, ranks.group)
