"""Control group: messages between all ranks from host memory, through one rank of each node.

The group consists of a gloo group for each node's ranks, and a gloo group for the nodes' first ranks, the leaders. A
message to all ranks goes from a node's ranks to their leader, from leader to leader, and from a leader to its node's
ranks. So with N nodes of 8 ranks a rank exchanges addresses with 8 ranks, and a leader also with N ranks, where a gloo
group of all ranks would exchange 8 N addresses with each rank. Training steps send no such messages.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridtron.device import compute_device
from hybridtron.parallel.plain_values import all_gather_values, broadcast_value, converted
from hybridtron.problems import Unusable
from hybridtron.storage.digest import digest_of

T = TypeVar("T")


@dataclass(frozen=True)
class Control:
    """Control group of this rank.

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

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.ranks_of_node is not None:
            dist.barrier(self.ranks_of_node)
        if self.leaders is not None:
            dist.barrier(self.leaders)
        if self.ranks_of_node is not None and len(self.nodes) > 1:
            dist.barrier(self.ranks_of_node)

    def once_a_node(self, read: Callable[[], T]) -> T:
        """Call a function that returns a plain value on each node's leader; return the value on all its ranks.

        If the function raises Unusable, OSError or ValueError on the leader, the other ranks raise Unusable with the
        error's message.
        """
        fault: Exception | None = None
        result: Any = None
        if self.leads:
            try:
                result = read()
            except (Unusable, OSError, ValueError) as error:
                fault = error
        if fault is None:
            message = [result, None]
        else:
            message = [None, str(fault)]
        value, words = self._from_leader(message)
        if fault is not None:
            raise fault
        if words is not None:
            raise Unusable(words, code="unreadable")
        return value

    def _from_leader(self, value: Any) -> Any:
        """Return the value of this node's leader."""
        if self.ranks_of_node is None:
            return value
        return broadcast_value(value, self.leader, self.ranks_of_node)


def alone(rank: int) -> Control:
    """Return a control group that sends nothing, for a rank without other processes; it may act as one of many."""
    return Control(rank, [[rank]], 0, None, None)


def form(rank: int, world_size: int, timeout: timedelta) -> Control:
    """Form the control group. All ranks call this together, after torch.distributed was initialized."""
    nodes = nodes_of(_names_of_nodes(world_size))
    node = next(index for index, ranks in enumerate(nodes) if rank in ranks)
    ranks_of_node = _gloo_group(nodes[node], timeout)
    leaders = None
    if nodes[node][0] == rank:
        leaders = _gloo_group([ranks[0] for ranks in nodes], timeout)
    return Control(rank, nodes, node, ranks_of_node, leaders)


def nodes_of(names: Sequence[Any]) -> list[list[int]]:
    """Return the ranks of each node from every rank's node, in the order of the nodes' first ranks."""
    nodes: dict[Any, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())


def node_name() -> str:
    """Return this machine's name, which ranks on one node have in common."""
    return socket.gethostname()


def _names_of_nodes(world_size: int) -> list[int]:
    """All-gather a digest of the node's name over the group that computes, before the control group exists."""
    own = torch.tensor([int(digest_of(node_name().encode())[:15], 16)], device=compute_device())
    names = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(names, own)
    return torch.cat(names).tolist()


def _gloo_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Form a gloo group of these ranks, which alone call this together; None for a single rank."""
    if len(ranks) == 1:
        return None
    group: Any = dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=True)
    return group
