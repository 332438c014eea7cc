"""A campaign of ordeals: faults one after the other, each with a line in a record. It continues after the last line.

Each fault is a run of its own, compared with an undisturbed run of the same layout, which is trained again after a new
commit. The faults take turns over kinds, layouts, ranks and steps, so that the first 8 try every kind once. A slow rank
can only be named with four data-parallel ranks, so it is tried with the layout dp4.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridtron.proving.chaos import ordeals
from hybridtron.proving.chaos.faults import unshare_mounts
from hybridtron.proving.chaos.ordeal_hook import KINDS, PlannedFault
from hybridtron.proving.chaos.ordeals import (
    EVERY,
    LOCAL_EVERY,
    LOSES_NODE,
    RANKS,
    STEPS,
    TIMEOUT_S,
    Ordeal,
    lost_time,
    noticed,
    step_of,
    wrong,
)
from hybridtron.proving.chaos.training_run import LAYOUTS, Run, write_data
from hybridtron.resources import PACKAGE
from hybridtron.train.jsonl import read_lines
from hybridtron.train.supervisor import faults

Compare = Callable[[Run, Run], list[str]]
HEADER = ("layout", "ordeal", "rank", "step", "noticed after", "limit", "found", "restarted", "repeated", "end")
SUMMARY_HEADER = ("ordeal", "faults", "layouts", "most of its limit", "found", "restarted", "repeated", "as it should")
MOST_FAULTS = 64  # faults of the whole campaign
FEW_DIFFERENCES = 3  # differences of a fault that the record keeps


@dataclass(frozen=True)
class PassedOrdeal:
    """A line of the record: a fault whose run has ended.

    commit: the code's commit, with `-dirty` if files were changed
    ended: the time of the end, in seconds since 1970
    layout, ordeal, rank, step: the fault
    noticed: text from the run's log about the fault; empty if it was not noticed
    after, limit, unit: time until the fault was noticed, and the most that it may take, in `s` or `steps`
    lost: seconds lost by cause (found, restarted, repeated)
    resumed: the step from which training continued; None without a restart
    spare: the host that took over; empty if the rank's own host continued
    equal: True if the run has ended with the bits of the undisturbed run
    wrong: descriptions of what is wrong
    seconds: duration of the disturbed run
    """

    commit: str
    ended: float
    layout: str
    ordeal: str
    rank: int
    step: int
    noticed: str = ""
    after: float = 0.0
    limit: float = 0.0
    unit: str = ""
    lost: Mapping[str, float] = field(default_factory=dict)
    resumed: int | None = None
    spare: str = ""
    equal: bool = False
    wrong: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def fault(self) -> Ordeal:
        return Ordeal(self.layout, PlannedFault(self.ordeal, self.rank, self.step))

    def cells(self) -> tuple[str, ...]:
        """Return the fault's row on the page, for the columns of HEADER."""
        after = limit = ""
        if self.noticed:
            after = f"{self.after:.1f} {self.unit}"
            limit = f"{self.limit:.1f} {self.unit}"
        lost = [f"{self.lost.get(cause, 0.0):.1f} s" for cause in ("found", "restarted", "repeated")]
        if self.wrong:
            end = "**" + "; ".join(self.wrong) + "**"
        elif self.equal:
            end = "equal"
        else:
            end = "**not equal**"
        return (self.layout, self.ordeal, str(self.rank), str(self.step), after, limit, *lost, end)


def plan(count: int) -> list[Ordeal]:
    """Return the first faults of the campaign.

    A round has a fault of each kind, with layouts in turn. After a round on each layout the other rank is at fault, in
    a later step. A node that is lost is always the second, because the first node has the coordinator.
    """
    layouts = list(LAYOUTS)
    planned = []
    for number in range(count):
        turn, index = divmod(number, len(KINDS))
        kind = KINDS[index]
        cycle = turn // len(layouts)
        layout = layouts[(turn + index) % len(layouts)]
        rank = (1 + cycle) % RANKS[layout]
        if kind in LOSES_NODE:
            rank = 1
        elif kind == "slow rank":
            layout = "dp4"
            rank = turn % RANKS[layout]
        planned.append(Ordeal(layout, PlannedFault(kind, rank, step_of(kind, cycle))))
    return planned


def read(path: Path) -> list[PassedOrdeal]:
    """Read a record; a line that was not written whole is skipped."""
    names = {each.name for each in fields(PassedOrdeal)}
    return [PassedOrdeal(**line) for line in read_lines(path) if line.keys() == names]


def append(path: Path, passed: PassedOrdeal) -> None:
    """Add a line to a record, and wait until it is on disk."""
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read(1) not in (b"", b"\n"):  # the last line was not written whole
            file.write(b"\n")
        file.write(json.dumps(asdict(passed)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def commit() -> str:
    """Return the checkout's commit, with `-dirty` if files were changed; `unknown` outside a git repository."""
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return "unknown"
    return process.stdout.strip() or "unknown"


class Campaign:
    """Runs the faults that a record lacks.

    home: the folder of all runs
    record: the record's file
    compare: describes all differences between an undisturbed run and another one
    """

    def __init__(self, home: Path, record: Path, compare: Compare) -> None:
        self.home = home
        self.record = record
        self.compare = compare
        self.commit = commit()
        self.disk = home / "disk"
        self.trained: set[str] = set()  # layouts whose undisturbed run was trained by this program

    def carry_on(self, count: int, say: Callable[[str], None]) -> None:
        """Pass the faults of the plan that have no line in the record."""
        known = {passed.fault for passed in read(self.record)}
        planned = plan(count)
        if not unshare_mounts():
            planned = [ordeal for ordeal in planned if ordeal.kind != "full local disk"]
            say("the full local disk is skipped, because this system allows no mounts")
        left = [ordeal for ordeal in planned if ordeal not in known]
        say(f"{len(planned) - len(left)} of {len(planned)} faults are in {self.record}; run folders: {self.home}")
        self.record.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for number, ordeal in enumerate(left, start=1):
            passed = self.passed(ordeal)
            append(self.record, passed)
            each_s = (time.monotonic() - began) / number
            result = "; ".join(passed.wrong) or "as it should"
            say(
                f"{len(planned) - len(left) + number} of {len(planned)}: {ordeal.kind}, rank {ordeal.fault.rank} of "
                f"{ordeal.layout}, {passed.seconds:.0f} s: {result}; about {(len(left) - number) * each_s / 60:.0f} "
                f"min left"
            )

    def passed(self, ordeal: Ordeal) -> PassedOrdeal:
        """Let a run pass through an ordeal. The folder of a run with which something is wrong stays."""
        undisturbed = self.undisturbed(ordeal.layout)
        run = self._new_run(self.home / "disturbed", ordeal.layout)
        began = time.monotonic()
        codes = ordeals.run_supervised(run, ordeal.layout, self.disk, ordeal.fault)
        seconds = time.monotonic() - began
        failures = wrong(run, ordeal, codes)
        differences = self.compare(undisturbed, run)
        passed = PassedOrdeal(
            commit=self.commit,
            ended=time.time(),
            layout=ordeal.layout,
            ordeal=ordeal.kind,
            rank=ordeal.fault.rank,
            step=ordeal.fault.step,
            equal=not differences,
            wrong=[*failures, *differences[:FEW_DIFFERENCES]],
            seconds=seconds,
            **self._observed(run, ordeal),
        )
        if passed.wrong:
            run.home.rename(self.home / f"wrong-{time.strftime('%Y%m%d-%H%M%S')}")
        return passed

    def _observed(self, run: Run, ordeal: Ordeal) -> dict[str, Any]:
        """Return the record's values that come from the run's logs."""
        values: dict[str, Any] = {"lost": lost_time(run)}
        seen = noticed(run, ordeal)
        if seen is not None:
            values |= {"noticed": seen.words, "after": seen.after, "limit": seen.limit, "unit": seen.unit}
        for fault in faults.read(run.folder)[:1]:
            values |= {"resumed": fault.resumed, "spare": fault.spare}
        return values

    def undisturbed(self, layout: str) -> Run:
        """Return a layout's undisturbed run by this commit, which is trained if there is none."""
        home = self.home / f"undisturbed-{layout}-{self.commit}"
        if layout in self.trained or (home.exists() and not self.commit.endswith("-dirty")):
            return Run(home, self._arguments(layout), STEPS[layout])
        run = self._new_run(self.home / "undisturbed", layout)
        codes = ordeals.run_supervised(run, layout, self.disk)
        if any(codes) or faults.read(run.folder):
            raise CampaignFailed(f"the undisturbed run of {layout} has failed: see {run.home / 'task-0.log'}")
        shutil.rmtree(home, ignore_errors=True)
        self.trained.add(layout)
        return Run(run.home.rename(home), run.arguments, run.steps)

    def _new_run(self, home: Path, layout: str) -> Run:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        return Run(home, self._arguments(layout), STEPS[layout])

    def _arguments(self, layout: str) -> tuple[str, ...]:
        data = self.home / "data"
        if not (data / "manifest.json").exists():
            write_data(data)
        return ordeals.arguments(data, layout, self.disk)


def write_page(passed: Sequence[PassedOrdeal], count: int, page: Path | None) -> None:
    """Print a report of a record, and write it to the file `page` if one is given."""
    from hybridtron.proving.measuring import BenchReport, publish

    commits = ", ".join(dict.fromkeys(each.commit for each in passed))
    settings = (
        f"run.timeout is {TIMEOUT_S:g} s; a checkpoint every {EVERY} steps, a local one every {LOCAL_EVERY} steps"
    )
    report = BenchReport("Ordeals", notes=[f"commits: {commits}", settings, verdict(passed, count)])
    report.table("by ordeal", SUMMARY_HEADER, [summary(kind, passed) for kind in KINDS])
    report.table("faults", HEADER, [each.cells() for each in passed])
    publish(report, "hybridtron chaos --ordeals", page)


def verdict(passed: Sequence[PassedOrdeal], count: int) -> str:
    """Return the page's line about the result."""
    silent = sum(not each.noticed for each in passed)
    late = sum(each.after > each.limit for each in passed)
    unequal = sum(not each.equal for each in passed)
    bad = sum(bool(each.wrong) for each in passed)
    return (
        f"{len(passed)} of {count} faults: {silent} not noticed, {late} noticed after their limit, {unequal} with an "
        f"end other than the undisturbed run's, {bad} with anything wrong"
    )


def summary(kind: str, passed: Sequence[PassedOrdeal]) -> tuple[str, ...]:
    """Return a kind's row in the table by ordeal, for the columns of SUMMARY_HEADER."""
    of_kind = [each for each in passed if each.ordeal == kind]
    layouts = ", ".join(dict.fromkeys(each.layout for each in of_kind))
    slowest = max((each.after / each.limit for each in of_kind if each.noticed), default=0.0)
    lost = [sum(each.lost.get(cause, 0.0) for each in of_kind) for cause in ("found", "restarted", "repeated")]
    good = sum(not each.wrong for each in of_kind)
    return (kind, str(len(of_kind)), layouts, f"{slowest:.0%}", *(f"{seconds:.1f} s" for seconds in lost), str(good))


class CampaignFailed(Exception):
    """Raised when an undisturbed run fails."""
