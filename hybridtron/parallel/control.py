"""Control group: passes messages in host memory between all ranks, by way of one rank on each node.

The group consists of a gloo group for each node's ranks, and a gloo group for the nodes' first ranks, the leaders. A
message to all ranks goes from a node's ranks to their leader, from leader to leader, and from a leader to its node's
ranks. So with N nodes of 8 ranks a rank exchanges addresses with the 8 ranks of its node, and a leader also with N
leaders; in a gloo group of all ranks, each rank would exchange 8 N addresses. Training steps send no such messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridtron.device import compute_device
from hybridtron.parallel.plain_values import all_gather_values, broadcast_value, converted
from hybridtron.problems import ConfigError, Problem, Unusable, first_line
from hybridtron.storage.digest import digest_of

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Control:
    """Control group of this rank.

    rank: this rank's global number
    nodes: the global ranks of each node, in the order of their first ranks
    node: index of this rank's node in `nodes`
    ranks_of_node: gloo group for this node's ranks; None if the rank is alone on its node
    leaders: gloo group for the nodes' first ranks; None on other ranks, and with one node
    """

    rank: int
    nodes: Sequence[Sequence[int]]
    node: int
    ranks_of_node: dist.ProcessGroup | None
    leaders: dist.ProcessGroup | None

    @property
    def leader(self) -> int:
        """The global rank of this node's leader."""
        return self.nodes[self.node][0]

    @property
    def node_of_rank(self) -> list[int]:
        """The index of each rank's node."""
        nodes = {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}
        return [nodes[rank] for rank in sorted(nodes)]

    @property
    def leads(self) -> bool:
        """True on the first rank of a node."""
        return self.rank == self.leader

    def all_gather(self, value: Any) -> list[Any]:
        """All-gather a plain value from each rank; return the values by rank."""
        values = [converted(value)]
        if self.ranks_of_node is not None:
            values = all_gather_values(value, self.ranks_of_node)
        of_nodes = [values]
        if self.leaders is not None:
            of_nodes = all_gather_values(values, self.leaders)
        if len(self.nodes) > 1:
            of_nodes = self._from_leader(of_nodes)
        by_rank = {
            rank: value
            for ranks, values in zip(self.nodes, of_nodes, strict=True)
            for rank, value in zip(ranks, values, strict=True)
        }
        return [by_rank[rank] for rank in sorted(by_rank)]

    def all_gather_on_node(self, value: Any) -> list[Any]:
        """All-gather a plain value from each rank of this node; return the values in the order of the ranks."""
        if self.ranks_of_node is None:
            return [converted(value)]
        return all_gather_values(value, self.ranks_of_node)

    def all_gather_of_leaders(self, value: Any) -> list[Any]:
        """All-gather a plain value from each node's leader; return the values in the order of the nodes.

        Only leaders call this.
        """
        if self.leaders is None:
            return [converted(value)]
        return all_gather_values(value, self.leaders)

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.ranks_of_node is not None:
            dist.barrier(self.ranks_of_node)
        if self.leaders is not None:
            dist.barrier(self.leaders)
        if self.ranks_of_node is not None and len(self.nodes) > 1:
            dist.barrier(self.ranks_of_node)

    def once(self, read: Callable[[], T]) -> T:
        """Call a function that returns a plain value on rank 0; return the value on all ranks.

        If the function raises an error, all ranks raise it: the other ranks raise a copy of a ConfigError, or Unusable
        with the error's first line.
        """
        return self._shared(read, self.rank == 0, over_all=True)

    def once_a_node(self, read: Callable[[], T]) -> T:
        """Call a function on each node's leader; return its value on the node's ranks. Errors as in `once`."""
        return self._shared(read, self.leads, over_all=False)

    def together(self, act: Callable[[], None]) -> None:
        """Call a function on every rank. If it fails on a rank, all ranks raise an error once all have called it.

        The error is that of the first rank that failed. The other ranks raise a copy of a ConfigError, or Unusable with
        the rank and the error's first line. All ranks call this together.
        """
        fault: Exception | None = None
        try:
            act()
        except Exception as error:  # after any error the other ranks still wait for a message
            fault = error
        faults = self.all_gather(None if fault is None else [self.rank, _described(fault)])
        first = next(filter(None, faults), None)
        if first is None:
            return
        rank, described = first
        if fault is not None and rank == self.rank:
            raise fault
        if isinstance(described, str):
            described = f"rank {rank}: {described}"
        raise _error(described)

    def _shared(self, read: Callable[[], T], reads: bool, over_all: bool) -> Any:
        fault: Exception | None = None
        message: Any = None
        if reads:
            try:
                message = {"value": read()}
            except Exception as error:  # after any error the other ranks still wait for a message
                fault = error
                message = {"fault": _described(error)}
        if over_all and self.leaders is not None:
            message = broadcast_value(message, 0, self.leaders)
        message = converted(self._from_leader(message))
        if fault is not None:
            raise fault
        if "fault" in message:
            raise _error(message["fault"])
        return message["value"]

    def _from_leader(self, value: Any) -> Any:
        """Return the value of this node's leader."""
        if self.ranks_of_node is None:
            return value
        return broadcast_value(value, self.leader, self.ranks_of_node)


def alone(rank: int) -> Control:
    """Return a control group that sends nothing, for a single process; its rank may be any of a larger layout."""
    return Control(rank, [[rank]], 0, None, None)


def form(rank: int, world_size: int, timeout: timedelta) -> Control:
    """Form the control group. All ranks call this together, after torch.distributed was initialized."""
    nodes = nodes_of(_names_of_nodes(world_size))
    node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    groups = [_gloo_group(ranks, rank, timeout) for ranks in nodes]
    leaders = _gloo_group([ranks[0] for ranks in nodes], rank, timeout)
    return Control(rank, nodes, node, groups[node], leaders)


def form_again(control: Control, timeout: timedelta) -> Control:
    """Form a second control group with the same nodes, for a thread beside the training thread.

    Two threads must not share a group, because a group's messages need the same order on all ranks. All ranks call this
    together.
    """
    groups = [_gloo_group(ranks, control.rank, timeout) for ranks in control.nodes]
    leaders = _gloo_group([ranks[0] for ranks in control.nodes], control.rank, timeout)
    return Control(control.rank, control.nodes, control.node, groups[control.node], leaders)


def nodes_of(names: Sequence[Any]) -> list[list[int]]:
    """Group the ranks by node, in the order of the nodes' first ranks; `names` has the node of each rank."""
    nodes: dict[Any, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def node_name() -> str:
    """Return this machine's name, which is equal for all ranks on one node."""
    return socket.gethostname()


def _boot() -> str:
    """Return the random text that Linux draws at each boot. It differs between machines with the same name."""
    with suppress(OSError):
        return BOOT_ID.read_text()
    return ""


def _names_of_nodes(world_size: int) -> list[int]:
    """All-gather digests of the nodes' names over the default group, before the control group exists."""
    name = f"{node_name()} {_boot()}"
    digest = torch.tensor([int(digest_of(name.encode())[:15], 16)], device=compute_device())
    names = [torch.empty_like(digest) for _ in range(world_size)]
    dist.all_gather(names, digest)
    return torch.cat(names).tolist()


def _gloo_group(members: Sequence[int], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Form a gloo group; return None if it has one member, or if this rank is not a member. All ranks call this.

    With `use_local_synchronization` only the members would have to call this. But then torch names the group by the
    number of groups that a rank is in, and this number differs between the ranks of a pipeline.
    """
    if len(members) == 1:
        return None
    group: Any = dist.new_group(list(members), timeout, "gloo")
    if rank not in members:
        return None
    return group


def _described(error: Exception) -> Any:
    """Return a plain value for an error: the problems of a ConfigError, or else the first line."""
    if isinstance(error, ConfigError):
        return [[problem.key, problem.code, problem.message] for problem in error.problems]
    return first_line(error)


def _error(described: Any) -> Unusable:
    """Return the error that another rank has described."""
    if isinstance(described, str):
        return Unusable(described, code="unreadable")
    return ConfigError([Problem(key, code, message) for key, code, message in described])
