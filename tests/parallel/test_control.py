"""The control group: its messages reach all ranks through one rank of each node, and steps send none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import ParallelConfig
from hybridtron.parallel import control, groups
from hybridtron.parallel.pool import Seat
from hybridtron.problems import Unusable
from tests.distributed import run_distributed


def named(seat: Seat, nodes: str, pipeline: int) -> groups.Groups:
    """Start groups on ranks whose nodes have the names that the letters of `nodes` give."""
    control.node_name = lambda: nodes[seat.rank]
    launch = ProcessLaunch(seat.rank, seat.world_size)
    return groups.start(ParallelConfig(pipeline=pipeline), f"file://{seat.meeting_file}", launch)


def exchanged(seat: Seat, nodes: str, pipeline: int) -> tuple[Any, ...]:
    group = named(seat, nodes, pipeline).control
    gathered = group.all_gather([seat.rank, None])
    group.barrier()
    calls: list[int] = []

    def read() -> str:
        calls.append(seat.rank)
        return f"from {seat.rank}"

    shared = group.once_a_node(read)

    def fail() -> str:
        raise OSError("no such file")

    try:
        group.once_a_node(fail)
    except (OSError, Unusable) as error:
        fault = type(error).__name__
    sizes = [0 if each is None else dist.get_world_size(each) for each in (group.ranks_of_node, group.leaders)]
    return gathered, shared, calls, fault, sizes


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("nodes", "pipeline"),
    [
        pytest.param("aabb", 1, marks=pytest.mark.slow),
        pytest.param("aaaa", 1, marks=pytest.mark.slow),
        ("aab", 1),
        ("abab", 4),
    ],
)
def test_messages_reach_all_ranks_of_all_nodes(nodes: str, pipeline: int) -> None:
    """With `abab` the ranks of a node are not neighbors, and in a pipeline they are in different numbers of groups."""
    count = len(nodes)
    results = run_distributed(exchanged, count, nodes, pipeline)
    for rank, (gathered, shared, calls, fault, sizes) in enumerate(results):
        leader = nodes.index(nodes[rank])
        leads = leader == rank
        assert gathered == [[each, None] for each in range(count)]
        assert shared == f"from {leader}"
        assert calls == ([rank] if leads else [])
        assert fault == ("OSError" if leads else "Unusable")
        own = nodes.count(nodes[rank])
        assert sizes == [own if own > 1 else 0, 2 if leads and len(set(nodes)) == 2 else 0]


def test_a_single_rank_sends_nothing() -> None:
    group = control.alone(3)
    assert group.all_gather(("a", 1)) == [["a", 1]]
    group.barrier()
    assert group.once_a_node(lambda: "value") == "value"
    assert group.leads


def test_ranks_are_grouped_by_their_nodes() -> None:
    assert control.nodes_of(["b", "a", "b", "c"]) == [[0, 2], [1], [3]]


class Asked:
    """Records the backends that a process asks for, in place of a GPU machine's groups."""

    def __init__(self) -> None:
        self.default: list[str] = []
        self.further: list[tuple[str | None, int]] = []


def backends(seat: Seat) -> tuple[list[str], list[tuple[str | None, int]]]:
    """Form a layout's groups where the device is a GPU by its name, and gloo answers for NCCL."""
    asked = Asked()
    first = dist.init_process_group
    further = dist.new_group

    def init(backend: str, **options: Any) -> None:
        asked.default.append(backend)
        first("gloo", **options)

    def new(ranks: Any = None, timeout: Any = None, backend: str | None = None, *rest: Any, **options: Any) -> Any:
        asked.further.append((backend, len(ranks)))
        return further(ranks, timeout, backend, *rest, **options)

    groups.dist.init_process_group = init
    groups.dist.new_group = new
    groups.compute_device = lambda: torch.device("cuda")
    parallel = ParallelConfig(tensor=2)
    groups.start(parallel, f"file://{seat.meeting_file}", ProcessLaunch(seat.rank, seat.world_size))
    return asked.default, asked.further


@pytest.mark.gloo
def test_gpus_have_gloo_in_the_control_group_alone() -> None:
    """A group without a backend of its own has the default group's, which is NCCL's alone."""
    for default, further in run_distributed(backends, 4):
        assert default == ["nccl"]
        assert [entry for entry in further if entry[0] not in (None, "nccl")] == [("gloo", 4)]
        assert len(further) > 10


def test_the_control_group_waits_as_long_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, *_, **__: waits.append(timeout))
    monkeypatch.setattr(control, "_names_of_nodes", lambda world_size: ["a", "a", "b", "b"])
    control.form(0, 4, timedelta(seconds=7))
    assert waits == [timedelta(seconds=7)] * 3
