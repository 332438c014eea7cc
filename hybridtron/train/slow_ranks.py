"""Slow ranks: each rank's time by section in every step, and the ranks that are slower than their peers.

In a synchronous step all ranks end together, so a slow rank shows only in the time before it waits for others:

    data      wait for the step's batches
    passes    forward and backward passes of all micro-batches, until gradients are reduced; on a GPU the time between
              two events in its stream
    rest      the rest of the previous step: reductions, the update, and hooks. Most of it is waiting for other ranks

The reduction of the gradient norm (`Engine.step`) also sums each rank's times of its last step. Every rank has places
of its own in the sums, in which the others add zeros. So the sums are an all-gather without another message or wait.

The peers of a rank compute the same work on other data: they have the same place along the tensor, context and pipeline
dimensions. The rule compares the time for data and passes. For each step, a rank's ratio is its time divided by its
peers' median. A rank is slow if the median of its last WINDOW ratios exceeds the peers' median by more than FLOOR, and
by more than SPREADS times the peers' spread (1.48 times the median absolute deviation). At least FEWEST peers are
needed. The rule was simulated with 8 to 512 peers. If times vary by 5% from step to step, and 2% of them are 1.5 to 4
times as long, it names a rank that takes 20% longer within 20 steps, and no rank in 2,000 steps without a slow one. If
times vary by 8%, it also names ranks that are not slow. With tensor, context or pipeline parallelism a slow rank also
slows the other ranks of its replica, and all of them are named. With expert parallelism all ranks of a stage exchange
tokens in their passes and wait for the slowest, so that none may be named.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from hybridtron.parallel.control import node_name
from hybridtron.parallel.groups import Groups

LOG = logging.getLogger(__name__)
SECTIONS = ("data", "passes", "rest")
WINDOW = 16  # steps
FLOOR = 0.1
SPREADS = 5.0
FEWEST = 4
NORMAL = 1.4826  # standard deviation of normal numbers divided by their median absolute deviation
MOST_NAMED = 8  # ranks that a message or a step's metrics name


class SlowRule:
    """The rule that names slow ranks, from the times of the last WINDOW steps."""

    def __init__(self, peers: Sequence[Sequence[int]]) -> None:
        self.peers = [list(ranks) for ranks in peers if len(ranks) >= FEWEST]
        self.ratios: deque[np.ndarray] = deque(maxlen=WINDOW)

    def add(self, times: np.ndarray) -> dict[int, float]:
        """Add each rank's time in one step; return the slow ranks, each with the excess over its peers' median."""
        ratios = np.ones(len(times))
        for ranks in self.peers:
            ratios[ranks] = times[ranks] / max(float(np.median(times[ranks])), 1e-9)
        self.ratios.append(ratios)
        if len(self.ratios) < WINDOW:
            return {}
        medians = np.median(np.stack(self.ratios), axis=0)
        slow: dict[int, float] = {}
        for ranks in self.peers:
            excess = medians[ranks] - np.median(medians[ranks])
            spread = NORMAL * float(np.median(np.abs(excess)))
            slow |= {
                ranks[index]: float(excess[index]) for index in np.nonzero(excess > max(FLOOR, SPREADS * spread))[0]
            }
        return slow


class RankTimes:
    """Gathers every rank's times, and warns of slow ranks on the first rank.

    `numbers` and `take` are called once in each step, on all ranks.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank = groups.rank
        self.seconds = [0.0] * len(SECTIONS)
        self.asked: float | None = None  # time at which the last step's data was requested
        self.warns = groups.is_first
        place = [node_name(), [groups.tensor.rank, groups.context.rank, groups.pipeline.rank]]
        gathered = groups.control.all_gather(place)
        self.hosts = [host for host, _ in gathered]
        places = [place for _, place in gathered]
        peers: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            peers.setdefault(tuple(place), []).append(rank)
        self.rule = SlowRule(list(peers.values()))
        self.compared = bool(self.rule.peers)
        self.slow: dict[int, float] = {}
        self.last: np.ndarray | None = None  # seconds of each rank (row) in each section, in the step before the last

    def numbers(self, asked: float) -> list[float]:
        """Return this rank's contribution to the sums: its last step's times, and zeros in the other ranks' places.

        Empty if ranks have too few peers to compare. `asked` is the time at which this step's data was requested.
        """
        if not self.compared:
            return []
        if self.asked is not None:
            self.seconds[2] = max(0.0, asked - self.asked - self.seconds[0] - self.seconds[1])
        self.asked = asked
        values = [0.0] * (len(SECTIONS) * len(self.hosts))
        first = self.rank * len(SECTIONS)
        values[first : first + len(SECTIONS)] = self.seconds
        return values

    def record(self, data: float, passes: float) -> None:
        """Set the seconds that this rank's last step took for data and passes."""
        self.seconds = [data, passes, 0.0]

    def take(self, sums: Sequence[float]) -> None:
        """Take all ranks' times, and warn of ranks that have become slow."""
        if not sums or not self.warns or not any(sums):
            return
        self.last = np.array(sums).reshape(len(self.hosts), len(SECTIONS))
        slow = self.rule.add(self.last[:, 0] + self.last[:, 1])
        if new := {rank: excess for rank, excess in slow.items() if rank not in self.slow}:
            LOG.warning("SLOW: %s", self.words(new))
        if ended := [rank for rank in self.slow if rank not in slow]:
            LOG.warning("no longer slow: %s", ", ".join(self.name(rank) for rank in ended[:MOST_NAMED]))
        self.slow = slow

    def words(self, slow: Mapping[int, float]) -> str:
        """Describe slow ranks by host, the slowest first."""
        named = sorted(slow, key=lambda rank: -slow[rank])
        texts = [
            f"{self.name(rank)} is {slow[rank]:.0%} slower than its peers in {self.section(rank)}" for rank in named
        ]
        more = [f"and {len(named) - MOST_NAMED} more ranks"] * (len(named) > MOST_NAMED)
        return "; ".join([*texts[:MOST_NAMED], *more])

    def section(self, rank: int) -> str:
        """Return the section in which a rank exceeds its peers' median by the most seconds in the last step."""
        assert self.last is not None
        peers = next(ranks for ranks in self.rule.peers if rank in ranks)
        excess = self.last[rank, :2] - np.median(self.last[peers, :2], axis=0)
        return SECTIONS[int(np.argmax(excess))]

    def name(self, rank: int) -> str:
        """Return a rank's name: its host and its number."""
        return f"{self.hosts[rank]} rank {rank}"

    def metrics(self) -> Mapping[str, float] | None:
        """Return the largest and the median seconds of each section over all ranks; None before they are known."""
        if self.last is None:
            return None
        values: dict[str, float] = {}
        for index, section in enumerate(SECTIONS):
            values[f"{section}_median"] = float(np.median(self.last[:, index]))
            values[f"{section}_max"] = float(self.last[:, index].max())
        return values

    def slow_metrics(self) -> Mapping[str, float] | None:
        """Return the slow ranks' excess by name, at most MOST_NAMED; None without slow ranks."""
        named = sorted(self.slow, key=lambda rank: -self.slow[rank])[:MOST_NAMED]
        return {self.name(rank): round(self.slow[rank], 3) for rank in named} or None
