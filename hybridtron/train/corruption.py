"""Silent corruption: a run looks for ranks whose bits are wrong, names them, and returns to a verified checkpoint.

Each check of `engine/corruption.py` concerns the state after the step before:

    state       in each step, with `run.verify_state`: moments and masters are those that the last update has written
    weights     every `run.verify_state` steps: all copies of a shard have equal bits
    gradients   every `run.verify_every` steps: all data-parallel ranks compute equal gradients of one micro-batch

Weights and gradients are also checked in the first step after a checkpoint was restored: at a start, at a rollback, and
at the beginning of a phase that needs another engine. The state is checked from the second step on. If a check fails,
the ranks exchange the digests that differ. A rank is at fault if most of its peers agree on other bits; of two ranks,
both are named. Checkpoints that were written since this kind of check last passed, and exports of them, are renamed to
`suspect-...`, so that no start uses them. Local checkpoints are removed. A start from scratch costs time, but a start
from corrupt values costs the run. Then

    state, or under a supervisor   the run ends with CorruptRank; the supervisor replaces the rank's node by a spare, if
                                   there is one, and starts all ranks again
    otherwise                      the run rolls back, and trains the same data again

RUN/logs/verified.json has the last step that each kind of check has verified, for the next start. It is written at each
start and rollback, and when a check has verified a new checkpoint. If the file lacks a kind, because its key is new,
the step of the start counts as verified.
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
from hybridtron.checkpoint.local_save import LocalWriter
from hybridtron.checkpoint.save import Saver
from hybridtron.config.checks.export import exported_step
from hybridtron.config.schema import RunConfig
from hybridtron.data.batch import Batch
from hybridtron.engine.corruption import GRADIENTS, STATE, WEIGHTS
from hybridtron.engine.engine import Engine
from hybridtron.parallel.control import node_name
from hybridtron.parallel.groups import Groups
from hybridtron.train.jsonl import read_record, write_whole
from hybridtron.train.local_checkpoints import reject_after
from hybridtron.train.outcome import CorruptRank
from hybridtron.train.rollback import RollbackRequested
from hybridtron.train.supervisor.sections import VARIABLE

LOG = logging.getLogger(__name__)
FILE = "verified.json"
ADVICE = "look for a broken device or memory: test the named nodes, and leave them out of the next start"
FAULTS = {  # the first of several that have failed is described
    STATE: "optimizer state or own weights changed between two updates",
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

    def rank(self, node_of_rank: Sequence[int]) -> int:
        """Return a rank at fault, whose node may be replaced; -1 if ranks on several nodes may be at fault.

        A wrong value spreads over the stages and tensor-parallel ranks of a replica, so the lowest of them may be a
        victim.
        """
        if self.undecided or len({node_of_rank[rank] for rank in self.outvoted}) != 1:
            return -1
        return self.outvoted[0]


def suspects_of(digests: Sequence[Mapping[str, int]]) -> Suspects:
    """Name the ranks at fault.

    digests: for each rank, digests by key; ranks with the same key must have the same digest
    """
    outvoted: set[int] = set()
    undecided: set[int] = set()
    for key in dict.fromkeys(key for of_rank in digests for key in of_rank):
        digest_of = {rank: of_rank[key] for rank, of_rank in enumerate(digests) if key in of_rank}
        [(common, votes)] = Counter(digest_of.values()).most_common(1)
        if 2 * votes > len(digest_of):
            outvoted |= {rank for rank, digest in digest_of.items() if digest != common}
        else:
            undecided |= digest_of.keys()
    return Suspects(sorted(outvoted), sorted(undecided - outvoted))


class CheckFailed(RollbackRequested):
    """Raised on all ranks in the step in which a check has failed. `rank` is the result of `Suspects.rank`."""

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
        self.first = 0  # first step after a checkpoint was restored, or of a new run
        self.gradient_checks = 0
        self.recorded: dict[str, int] = {}  # the content of FILE, as far as this start has written it

    @property
    def _kinds(self) -> list[str]:
        return [kind for kind, every in self.every.items() if every is not None]

    def start_from(self, step: int, continues: bool = True) -> None:
        """Prepare for the steps after `step`, at which a start or a rollback continues.

        continues: True if a checkpoint of this run was restored. Otherwise the records of earlier starts do not apply.
        """
        self.restored(step)
        if not self._kinds:
            return
        path = self.run_dir / "logs" / FILE
        stored = self.groups.control.once(lambda: read_record(path) if continues else {})
        newest = {**stored, **self.verified}  # after a rollback, memory is newer than the file
        self.verified = {kind: min(step, newest.get(kind, step)) for kind in self._kinds}
        self.recorded = {}
        if self.groups.is_first:
            self._record()  # the next start must not apply a record of steps that are trained again

    def restored(self, step: int) -> None:
        """Make the next step check weights and gradients, without counting the weights as verified.

        The checkpoint of `step` was restored, so that all copies of weights agree, whatever values it holds.
        """
        self.first = step + 1

    def due(self, kind: str, step: int) -> bool:
        """Return True if a step makes this check: a step after a multiple of the interval, or the first step."""
        every = self.every[kind]
        return every is not None and (step == self.first or (step - 1) % every == 0)

    def begin_step(self, engine: Engine, step: int, number: int, batches: Sequence[Batch]) -> None:
        """Make the checks that come before a step's passes, and choose the step's other checks.

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
        """Raise CheckFailed if a check of the step has failed."""
        counts = engine.checks.counts
        if failed_kinds := [kind for kind in FAULTS if counts.get(kind)]:
            raise self._failure(failed_kinds, engine.checks.report(failed_kinds[0]), step)
        passed = [kind for kind in self._kinds if kind in counts]
        if step == self.first and WEIGHTS in passed:
            passed.remove(WEIGHTS)  # all copies come from one checkpoint, so they agree even if it holds wrong values
        if passed:
            self.verified |= dict.fromkeys(passed, step - 1)
            if self.groups.is_first and any(self.recorded.get(kind, 0) < saver.step <= step - 1 for kind in passed):
                self._record()
        if self._kinds:
            saver.verified = frozenset(self.verified.values())

    def archive_suspects(self, failure: CheckFailed, local: LocalWriter | None) -> None:
        """Rename the checkpoints that may be corrupt, and remove local ones. Raises CorruptRank if the run must end.

        Call this only when no checkpoint is being written. `local` writes local checkpoints.
        """
        if self.groups.is_first:
            LOG.error("CORRUPT: %s; %s", failure.what, failure.advice)
        # first: once the folder's checkpoints are renamed, local ones would be newer, and a start would use them
        reject_after(failure.newest, local, self.groups.control, self.run_dir)
        if local is not None and self.groups.is_first:
            LOG.warning("local checkpoints after step %s may be corrupt, and are not used any more", failure.newest)
        for line in self.groups.control.once(lambda: self._archived(failure.newest)):
            if self.groups.is_first:
                LOG.warning("%s", line)
        if failure.kind == STATE or VARIABLE in os.environ:
            raise CorruptRank(f"{failure.what}; {failure.advice}", failure.rank)

    def _archived(self, newest: int) -> list[str]:
        """Rename checkpoints and exports after a step; return a line for each, and a line if no checkpoint is left."""
        renamed = checkpoints.archive_later(self.run_dir, newest, "suspect")
        lines = [f"a checkpoint that may be corrupt was renamed to {path}" for path in renamed]
        if renamed and not checkpoints.all_of(self.run_dir):
            lines.append(f"no checkpoint up to step {newest} is left in {self.run_dir}")
        for export in sorted((self.run_dir / "export").glob("*")):
            step = exported_step(export)
            if step is not None and step > newest and not export.name.startswith("suspect-"):
                lines.append(f"an export that may be corrupt was renamed to {checkpoints.archive(export, 'suspect')}")
        return lines

    def _record(self) -> None:
        """Write the verified steps. If the file can't be written, warn: training continues without it."""
        try:
            write_whole(self.run_dir / "logs" / FILE, json.dumps(self.verified))
            self.recorded = dict(self.verified)
        except OSError as error:
            LOG.warning("%s can't be written: %s", FILE, error)

    def _failure(self, failed_kinds: Sequence[str], report: Mapping[str, int], step: int) -> CheckFailed:
        """Describe the first kind of check that has failed. `report` has this rank's differing digests, by key."""
        kind = failed_kinds[0]
        gathered = self.groups.control.all_gather([node_name(), report])
        digests = [of_rank for _, of_rank in gathered]
        if kind == STATE:
            suspects = Suspects([rank for rank, of_rank in enumerate(digests) if of_rank], [])
        else:
            suspects = suspects_of(digests)
        # the checkpoint of the step before may have been written after the state's change
        newest = min(self.verified.get(failed, step - 2) for failed in failed_kinds)
        named_ranks = [*suspects.outvoted, *suspects.undecided]
        tensors = sorted({key for rank in named_ranks for key in digests[rank]})
        text = f"{FAULTS[kind]}: {_listed(tensors, MOST_TENSORS)}"
        hosts = [host for host, _ in gathered]
        if suspects.outvoted:
            text = f"{_ranks(suspects.outvoted, hosts)} at fault: {text}"
        if suspects.undecided:
            text = f"{text}; {_ranks(suspects.undecided, hosts)} differ without a majority, so each may be at fault"
        suspect = suspects.rank(self.groups.control.node_of_rank)
        return CheckFailed(kind, step, f"step {step}: {text}", rank=suspect, newest=newest)


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return _listed([f"{hosts[rank]} rank {rank}" for rank in ranks], MOST_NAMED)


def _listed(names: Sequence[str], most: int) -> str:
    more = [f"and {len(names) - most} more"] * (len(names) > most)
    return ", ".join([*names[:most], *more])
