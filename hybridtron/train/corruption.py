"""Silent corruption: a run looks for ranks whose bits are wrong, names them, and returns to a verified checkpoint.

Each check of `engine/corruption.py` concerns the state after the step before:

    state       in each step, with `run.verify_state`: moments and masters are those that the last update has written
    weights     every `run.verify_state` steps: all copies of a shard have equal bits
    gradients   every `run.verify_every` steps: all data-parallel ranks compute equal gradients of one micro-batch

All checks also run in the first step after a start or a rollback. If one fails, the ranks exchange the digests that
differ. A rank is named if a majority of its peers has other bits; of two ranks, both are named. Checkpoints since the
last check of the kind that passed are renamed to `suspect-...`, so that no start uses them. Then

    state, or under a supervisor   the run ends with CorruptRank; the supervisor replaces the rank's node by a spare, if
                                   there is one, and starts all ranks again
    otherwise                      the run rolls back, and trains the same data again

RUN/logs/verified.json has the last step that each kind of check has verified, for the next start.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.save import Saver
from hybridtron.config.schema import RunConfig
from hybridtron.data.batch import Batch
from hybridtron.engine.corruption import GRADIENTS, STATE, WEIGHTS
from hybridtron.engine.engine import Engine
from hybridtron.parallel.control import node_name
from hybridtron.parallel.groups import Groups
from hybridtron.train.jsonl import read_record, write_whole
from hybridtron.train.outcome import CorruptRank
from hybridtron.train.rollback import RollbackRequested
from hybridtron.train.supervisor.sections import VARIABLE

LOG = logging.getLogger(__name__)
FILE = "verified.json"
ADVICE = "look for a broken device or memory: test the named nodes, and leave them out of the next start"
FAULTS = {  # the first of several that have failed is described
    STATE: "moments or masters changed between two updates",
    WEIGHTS: "weights differ between copies",
    GRADIENTS: "gradients of one micro-batch differ between data-parallel ranks",
}
MOST_NAMED = 8  # ranks that a message names
MOST_TENSORS = 3  # tensors that a message names


@dataclass(frozen=True)
class Suspects:
    """Ranks with other bits than the majority, and ranks among which there is no majority."""

    outvoted: Sequence[int]
    undecided: Sequence[int]

    @property
    def rank(self) -> int:
        """The first rank at fault; -1 if it is unknown which rank is."""
        return next(iter(self.outvoted), -1)


def suspects_of(digests: Sequence[Mapping[str, int]]) -> Suspects:
    """Name the ranks at fault.

    digests: for each rank, digests by key; ranks with the same key must have the same digest
    """
    outvoted: set[int] = set()
    undecided: set[int] = set()
    for key in dict.fromkeys(key for of_rank in digests for key in of_rank):
        held = {rank: of_rank[key] for rank, of_rank in enumerate(digests) if key in of_rank}
        [(common, votes)] = Counter(held.values()).most_common(1)
        if 2 * votes > len(held):
            outvoted |= {rank for rank, digest in held.items() if digest != common}
        else:
            undecided |= held.keys()
    return Suspects(sorted(outvoted), sorted(undecided - outvoted))


class CorruptionFound(RollbackRequested):
    """Raised on all ranks in the step in which a check has failed. `rank` is as in `Suspects.rank`."""

    def __init__(self, kind: str, step: int, what: str, *, rank: int, newest: int) -> None:
        super().__init__(step, what, ADVICE, newest=newest, skips_data=False)
        self.kind = kind
        self.rank = rank


class CorruptionWatch:
    """Chooses the checks of each step, and acts on their results. All ranks call its methods together."""

    def __init__(self, run: RunConfig, groups: Groups, run_dir: Path) -> None:
        self.run = run
        self.groups = groups
        self.run_dir = run_dir
        self.every = {WEIGHTS: run.verify_state, GRADIENTS: run.verify_every}
        self.verified: dict[str, int] = {}  # kind -> last step that a check has verified
        self.first = 0  # first step after the start or the last rollback
        self.gradient_checks = 0

    @property
    def _kinds(self) -> list[str]:
        return [kind for kind, every in self.every.items() if every is not None]

    def start_from(self, step: int) -> None:
        """Begin after a start, or a rollback, to a step."""
        self.first = step + 1
        if not self._kinds:
            return
        path = self.run_dir / "logs" / FILE
        stored = self.groups.control.once(lambda: read_record(path))
        self.verified = {kind: min(step, stored.get(kind, step)) for kind in self._kinds}

    def due(self, kind: str, step: int) -> bool:
        """Return True if a step makes this check: the one after a multiple of the interval, or the first of a start."""
        every = self.every[kind]
        return every is not None and (step == self.first or (step - 1) % every == 0)

    def begin_step(self, engine: Engine, step: int, number: int, batches: Sequence[Batch]) -> None:
        """Make the checks that come before a step's passes, and choose the others.

        number: the step's number in its phase, from 0
        """
        engine.checks.begin()
        engine.checks.watches_state = self.run.verify_state is not None
        engine.checks.weights_due = self.due(WEIGHTS, step)
        if self.due(GRADIENTS, step):
            source = self.gradient_checks % self.groups.data.size
            self.gradient_checks += 1
            engine.compare_gradients(batches, source, number)

    def end_step(self, engine: Engine, step: int, saver: Saver) -> None:
        """Raise CorruptionFound if a check of the step has failed."""
        counts = engine.checks.counts
        if failed := [kind for kind in FAULTS if counts.get(kind)]:
            raise self._found(failed, engine.checks.report(failed[0]), step)
        passed = [kind for kind in self._kinds if kind in counts]
        if passed:
            self.verified |= dict.fromkeys(passed, step - 1)
            saver.verified = min(self.verified.values())
            if self.groups.is_first:
                write_whole(self.run_dir / "logs" / FILE, json.dumps(self.verified))

    def archive_suspects(self, found: CorruptionFound) -> None:
        """Rename the checkpoints that may be corrupt. Raises CorruptRank if the run must end.

        No checkpoint may be under way.
        """
        if self.groups.is_first:
            LOG.error("CORRUPT: %s", found.what)
            for path in checkpoints.archive_later(self.run_dir, found.newest, "suspect"):
                LOG.warning("a checkpoint that may be corrupt was renamed to %s", path)
        self.groups.control.barrier()
        if found.kind == STATE or VARIABLE in os.environ:
            raise CorruptRank(f"{found.what}; {found.advice}", found.rank)

    def _found(self, failed: Sequence[str], report: Mapping[str, int], step: int) -> CorruptionFound:
        """Describe the first of the kinds of checks that have failed; `report` has what differs on this rank."""
        kind = failed[0]
        gathered = self.groups.control.all_gather([node_name(), report])
        digests = [of_rank for _, of_rank in gathered]
        if kind == STATE:
            suspects = Suspects([rank for rank, of_rank in enumerate(digests) if of_rank], [])
        else:
            suspects = suspects_of(digests)
        # the checkpoint of the step before may have been written after the state's change
        newest = min(self.verified.get(each, step - 2) for each in failed)
        named = [*suspects.outvoted, *suspects.undecided]
        tensors = sorted({key for rank in named for key in digests[rank]})
        text = f"{FAULTS[kind]}: {_listed(tensors, MOST_TENSORS)}"
        hosts = [host for host, _ in gathered]
        if suspects.outvoted:
            text = f"{_ranks(suspects.outvoted, hosts)} at fault: {text}"
        if suspects.undecided:
            text = f"{text}; undecided, which of {_ranks(suspects.undecided, hosts)}"
        return CorruptionFound(kind, step, f"step {step}: {text}", rank=suspects.rank, newest=newest)


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return _listed([f"{hosts[rank]} rank {rank}" for rank in ranks], MOST_NAMED)


def _listed(names: Sequence[str], most: int) -> str:
    more = [f"and {len(names) - most} more"] * (len(names) > most)
    return ", ".join([*names[:most], *more])
