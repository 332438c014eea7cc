"""Loads of experts in a rehearsal, where tensors have no values: all experts get equally many choices."""

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
def even_loads() -> Iterator[None]:
    """Let ranks that divide the experts exchange equally many rows while the block runs."""
    exchanged = experts.exchanged_loads
    experts.exchanged_loads = _exchanged_loads
    try:
        yield
    finally:
        experts.exchanged_loads = exchanged


def _exchanged_loads(routing: Routing, ranks: RankGroup) -> tuple[Tensor, RowCounts]:
    """Count the message and the wait of `exchanged_loads`, and return even numbers of rows."""
    sent_RE = routing.loads_E.view(ranks.size, -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=ranks.group)
    report_wait("tolist")
    count, rest = divmod(routing.experts_TK.numel(), ranks.size)
    rows = [count + (rank < rest) for rank in range(ranks.size)]
    return received_RE, RowCounts(rows, rows, ranks.group)
