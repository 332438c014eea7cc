"""The number of connections that a rank has does not grow with the number of ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridtron.config.schema import ParallelConfig
from hybridtron.parallel import groups
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed


def sockets() -> int:
    """Count this process's open sockets."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:  # the folder's own descriptor, which is closed by now
            continue
    return sum(link.startswith("socket:") for link in links)


def _opened(seat: Seat, lazy: str) -> tuple[int, float]:
    """Form a layout's groups, reduce over all ranks, and return the sockets that this opened, and the sum."""
    os.environ[groups.LAZY_CONNECTIONS] = lazy
    before = sockets()
    launch = groups.ProcessLaunch(seat.rank, seat.world_size)
    groups.start(ParallelConfig(), f"file://{seat.meeting_file}", launch)
    total = torch.tensor(float(seat.rank))
    dist.all_reduce(total)
    opened = sockets() - before
    dist.barrier()  # before a rank ends, and its connections with it
    del os.environ[groups.LAZY_CONNECTIONS]
    return opened, total.item()


def opened_by(ranks: int, lazy: str) -> int:
    """Return the most sockets that one of these ranks has opened."""
    results = run_distributed(_opened, ranks, lazy)
    assert {total for _, total in results} == {ranks * (ranks - 1) / 2}
    return max(opened for opened, _ in results)


@pytest.mark.gloo
@pytest.mark.slow
def test_connections_do_not_grow_with_the_ranks() -> None:
    """Eager connections grow by about ten for each rank, so the count would see them."""
    lazy = {ranks: opened_by(ranks, "1") for ranks in (4, 8, 16)}
    assert max(lazy.values()) - min(lazy.values()) <= 4, lazy
    eager = {ranks: opened_by(ranks, "0") for ranks in (4, 8)}
    assert eager[8] - eager[4] > 30, (eager, lazy)


def _default(seat: Seat) -> str | None:
    os.environ.pop(groups.LAZY_CONNECTIONS, None)
    groups.start(ParallelConfig(), f"file://{seat.meeting_file}", groups.ProcessLaunch(seat.rank, seat.world_size))
    return os.environ.pop(groups.LAZY_CONNECTIONS, None)


@pytest.mark.gloo
def test_connections_are_lazy_unless_the_user_says_otherwise() -> None:
    assert run_distributed(_default, 2) == ["1", "1"]
