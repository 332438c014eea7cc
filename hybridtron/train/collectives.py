"""Comparison of the ranks' collectives after a hang: names the first rank whose calls differ from its peers'.

    python -m hybridtron.train.collectives RUN

At a hang each rank writes its recent collectives to RUN/logs/collectives-RANK.json (`watchdog.py`). A group counts its
collectives, so calls with the same number belong together. The rank is, in this order,

    1. the one that called another operation, or with another size, than most ranks of its group,
    2. the one for which others wait in a collective, while it waits for nobody, or has written no file,
    3. if all wait, the one for which most calls wait: it has called its groups in another order.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridtron.nested import NotParsed, json_of
from hybridtron.safe_open import read_regular
from hybridtron.train.jsonl import write_whole

TOGETHER_S = 60.0  # seconds in which all ranks write their files after a hang
FILE_BYTES = 2**26  # largest file that is read
FILES = "collectives-*.json"
MOST_BYTES = 2**24  # all files that a watchdog or a supervisor compares, because it must not take long
COMMAND = "python -m hybridtron.train.collectives"
MOST_NAMED = 8  # ranks that a message names
# operations to which all ranks pass tensors of the same sizes
EQUAL = ("all_reduce", "allreduce", "broadcast", "all_gather", "allgather", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """A collective that a rank has called.

    group, number: the group, and the call's number in it
    name: the operation, such as `gloo:all_reduce`
    tensors: sizes and data types, as text; empty if they may differ between ranks
    ended: True if the collective has ended on this rank
    time: the time of the call, in seconds since 1970
    """

    group: str
    number: int
    name: str
    tensors: str
    ended: bool
    time: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Call:
        name = str(values["name"])
        tensors = f"{values['sizes']} {values['dtypes']}" if any(part in name for part in EQUAL) else ""
        ended = bool(values["ended"])
        return cls(str(values["group"]), int(values["number"]), name, tensors, ended, float(values["time"]))

    @property
    def words(self) -> str:
        return f"{self.name} {self.tensors}".strip()


@dataclass(frozen=True)
class RankCalls:
    """The recent collectives of a rank.

    waits: True if the rank's main thread waited for other ranks, or a collective had not ended
    lost: True if earlier calls are not known any more
    started, ranks: the time at which this start of all ranks began, and the number of ranks
    groups: name -> global ranks
    """

    rank: int
    written: float
    waits: bool
    lost: bool
    started: float
    ranks: int
    groups: Mapping[str, Sequence[int]]
    calls: Sequence[Call]

    @cached_property
    def by_place(self) -> Mapping[tuple[str, int], Call]:
        """Group and number -> call."""
        return {(call.group, call.number): call for call in self.calls}

    @cached_property
    def last(self) -> Mapping[str, int]:
        """Group -> the number of its last call."""
        last: dict[str, int] = {}
        for call in self.calls:
            last[call.group] = max(call.number, last.get(call.group, 0))
        return last

    def lacks(self, call: Call) -> bool:
        """Return True if this rank has not made another rank's call. If that is not known, a rank that waits has."""
        if call.group in self.last or not self.lost:
            return self.last.get(call.group, 0) < call.number
        return not self.waits


@dataclass(frozen=True)
class Divergence:
    """The first rank that diverged, and a description."""

    rank: int
    what: str


def write_calls(logs: Path, rank: int, recorded: Mapping[str, Any], waits: bool) -> None:
    """Write this rank's recent collectives, with `started` and `ranks`, for `read_calls`.

    Raises OSError if the disk fails.
    """
    content = {"rank": rank, "written": time.time(), "waits": waits, **recorded}
    write_whole(logs / f"collectives-{rank}.json", json.dumps(content))


def read_calls(logs: Path, since: float) -> list[RankCalls]:
    """Read the files that ranks wrote since a time, of the last start of all ranks. Unreadable files are left out.

    Each start counts its groups and calls from the beginning, so files of two starts can't be compared.
    """
    ranks: list[RankCalls] = []
    for path in sorted(logs.glob(FILES)):
        try:
            values = json_of(read_regular(path, FILE_BYTES))
            calls = [Call.of(call) for call in values["calls"]]
            groups = {str(name): [int(rank) for rank in members] for name, members in values["groups"].items()}
            written = float(values["written"])
            waits = bool(values["waits"]) or not all(call.ended for call in calls)
            start = (float(values["started"]), int(values["ranks"]))
            of_rank = RankCalls(int(values["rank"]), written, waits, bool(values["lost"]), *start, groups, calls)
        except (OSError, NotParsed, AttributeError, KeyError, TypeError, ValueError, OverflowError):
            continue
        if written >= since:
            ranks.append(of_rank)
    last = max((of_rank.started for of_rank in ranks), default=0.0)
    return [of_rank for of_rank in ranks if of_rank.started == last]


def compare_at_hang(logs: Path, since: float) -> Divergence | None:
    """Compare the files of ranks since a time, without an error and without delay.

    If the files can't be compared or are too large, the rank is -1 and the description says why.
    """
    try:
        size = sum(path.stat().st_size for path in logs.glob(FILES))
        if size > MOST_BYTES:
            return Divergence(-1, f"collectives of {size / 1e6:.0f} MB are not compared here: {COMMAND} {logs.parent}")
        ranks = read_calls(logs, since)
        divergence = first_divergence(ranks)
    except Exception as error:
        return Divergence(-1, f"the collectives can't be compared: {error!r}")
    if divergence is None or len(ranks) >= ranks[0].ranks:
        return divergence
    return Divergence(divergence.rank, f"{divergence.what} ({len(ranks)} of {ranks[0].ranks} ranks have written)")


def first_divergence(ranks: Iterable[RankCalls]) -> Divergence | None:
    """Return the first rank whose collectives differ from its peers', or None if none does."""
    by_rank = {of_rank.rank: of_rank for of_rank in ranks}
    return _other_call(by_rank) or _missing_call(by_rank)


def _other_call(by_rank: Mapping[int, RankCalls]) -> Divergence | None:
    """Find the earliest number of a group at which ranks made different calls."""
    held: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, of_rank in by_rank.items():
        for place, call in of_rank.by_place.items():
            held.setdefault(place, {})[rank] = call
    unequal = [calls for calls in held.values() if len({call.words for call in calls.values()}) > 1]
    if not unequal:
        return None
    calls = min(unequal, key=lambda calls: min(call.time for call in calls.values()))
    [(usual, votes)] = Counter(call.words for call in calls.values()).most_common(1)
    odd = [rank for rank, call in calls.items() if call.words != usual]
    rank = odd[0]
    call = calls[rank]
    place = f"as number {call.number} of group {call.group}"
    peers = _named(peer for peer, its_call in calls.items() if its_call.words == usual)
    what = f"{_named(odd)} called {call.words} {place}, but {peers} called {usual}"
    if 2 * votes <= len(calls):
        return Divergence(-1, f"{what}: without a majority, each may be wrong")
    return Divergence(rank, what)


def _missing_call(by_rank: Mapping[int, RankCalls]) -> Divergence | None:
    """Find the rank for which others wait."""
    lacks: dict[int, list[tuple[int, Call]]] = {}  # rank -> ranks that wait for it, with their calls
    for rank, of_rank in by_rank.items():
        for call in of_rank.calls:
            if call.ended:
                continue
            for member in of_rank.groups.get(call.group, ()):
                if member != rank and (member not in by_rank or by_rank[member].lacks(call)):
                    lacks.setdefault(member, []).append((rank, call))
    if not lacks:
        return None
    idle = [rank for rank in lacks if rank not in by_rank or not by_rank[rank].waits]
    if idle:
        # a rank that has written first: another may only not have written yet
        rank = min(idle, key=lambda rank: (rank not in by_rank, min(call.time for _, call in lacks[rank])))
        state = "waits for nobody" if rank in by_rank else "has written no file"
    else:
        rank = max(lacks, key=lambda rank: (len(lacks[rank]), -rank))
        state = "waits elsewhere"
    call = min((call for _, call in lacks[rank]), key=lambda call: call.time)
    peers = _named(peer for peer, its_call in lacks[rank] if its_call.group == call.group)
    place = f"number {call.number} of group {call.group}"
    return Divergence(rank, f"rank {rank} {state} and lacks {call.words}, {place}, in which {peers} wait")


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(set(ranks))
    more = f" and {len(numbers) - MOST_NAMED} more" if len(numbers) > MOST_NAMED else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:MOST_NAMED]))}{more}"


def main(arguments: Sequence[str]) -> int:
    """Print the first rank that diverged at a run's last hang."""
    if len(arguments) != 1:
        print("usage: python -m hybridtron.train.collectives RUN", file=sys.stderr)
        return 2
    ranks = read_calls(Path(arguments[0]) / "logs", since=0.0)
    newest = max((of_rank.written for of_rank in ranks), default=0.0)
    ranks = [of_rank for of_rank in ranks if of_rank.written >= newest - TOGETHER_S]
    if not ranks:
        print(f"{arguments[0]}/logs has no file collectives-RANK.json: name a run that hung", file=sys.stderr)
        return 1
    divergence = first_divergence(ranks)
    text = "all ranks have made the same collectives" if divergence is None else divergence.what
    print(f"{len(ranks)} ranks: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
