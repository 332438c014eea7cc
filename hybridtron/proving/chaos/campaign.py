"""A campaign of ordeals: faults one after the other, each with a line in a record. It continues after the last line.

Each fault is a run of its own, compared with an undisturbed run of the same layout, which each program trains again.
The faults take turns over kinds, layouts, ranks and steps, so that the first 8 try every kind once. A slow rank can
only be named with four data-parallel ranks, so it is tried with the layout dp4.

Only lines of the present code count: with the same commit and torch, and without changed files. If the code changes
while a campaign runs, the campaign ends, because each run imports the code again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridtron.proving.chaos import ordeals
from hybridtron.proving.chaos.faults import unshare_mounts
from hybridtron.proving.chaos.ordeal_hook import KINDS, SLOWER, PlannedFault
from hybridtron.proving.chaos.ordeals import (
    EVERY,
    LOCAL_EVERY,
    LOSES_NODE,
    NEEDS_MOUNTS,
    RANKS,
    STEPS,
    TIMEOUT_S,
    UNRECORDED,
    Ordeal,
    log_of,
    lost_time,
    noticed,
    step_of,
    wrong,
)
from hybridtron.proving.chaos.training_run import LAYOUTS, Run, write_data
from hybridtron.resources import PACKAGE, git_output, shipped
from hybridtron.train.jsonl import read_lines
from hybridtron.train.supervisor import faults

Compare = Callable[[Run, Run], list[str]]
HEADER = ("layout", "ordeal", "rank", "step", "noticed after", "limit", "restarted", "repeated", "end")
SUMMARY_HEADER = ("ordeal", "faults", "layouts", "most of its limit", "restarted", "repeated", "as it should")
SKIPPED = "skipped, because this system allows no mounts: "
UNKNOWN = "unknown"  # commit of code outside a git repository
DIRTY = "-dirty"  # ends a commit's name if files were changed
MOST_FAULTS = 64  # faults of the whole campaign
LOST = ("restarted", "repeated")  # causes of lost time that the page has besides the time until the notice
FEW_DIFFERENCES = 3  # differences of a fault that the record keeps


@dataclass(frozen=True)
class PassedOrdeal:
    """A line of the record: a fault whose run has ended.

    commit: the code's commit, with `-dirty` if files were changed
    torch: torch's version
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
    torch: str
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
        if self.ordeal in UNRECORDED:
            lost = [""] * len(LOST)
        else:
            lost = [f"{self.lost.get(cause, 0.0):.1f} s" for cause in LOST]
        if self.wrong:
            end = "**" + "; ".join(self.wrong) + "**"
        elif self.equal:
            end = "equal"
        else:
            end = "**not equal**"
        return (self.layout, self.ordeal, str(self.rank), str(self.step), after, limit, *lost, end)


@dataclass(frozen=True)
class CampaignResult:
    """The lines of a campaign's faults.

    passed: lines that the present code has written, in the order of the plan
    skipped: kinds of faults that this system does not allow
    """

    passed: Sequence[PassedOrdeal]
    skipped: Sequence[str] = ()


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
    """Return the code's commit, with `-dirty` if a file of the package was changed or added; else UNKNOWN."""
    tracked = git_output("ls-files", "--error-unmatch", str(PACKAGE / "__init__.py"))  # not in a wheel's environment
    name = git_output("rev-parse", "--short=12", "HEAD")
    code = (str(PACKAGE), str(shipped("configs")))
    changed = git_output("status", "--porcelain", "--untracked-files=normal", "--", *code)
    if tracked is None or name is None or changed is None:
        return UNKNOWN
    return name + DIRTY * bool(changed)


class Campaign:
    """Runs the faults for which a record has no line of the present code.

    home: the folder of all runs, which one program uses at a time
    record: the record's file
    compare: describes all differences between an undisturbed run and another one
    """

    def __init__(self, home: Path, record: Path, compare: Compare) -> None:
        self.home = home
        self.record = record
        self.compare = compare
        self.commit = commit()
        self.torch = version("torch")
        self.disk = home / "disk"
        self.trained: set[str] = set()  # layouts whose undisturbed run was trained by this program

    def carry_on(self, count: int, say: Callable[[str], None]) -> CampaignResult:
        """Pass the faults of the plan that have no line of the present code, and return all lines of the plan.

        Raises CampaignFailed if another program uses the folder, or if the code changes meanwhile.
        """
        planned = plan(count)
        skipped: list[str] = []
        if not unshare_mounts():
            skipped = [kind for kind in NEEDS_MOUNTS if kind in {ordeal.kind for ordeal in planned}]
            planned = [ordeal for ordeal in planned if ordeal.kind not in skipped]
            say(SKIPPED + ", ".join(skipped))
        with _locked(self.home):
            lines = self._known()
            left = [ordeal for ordeal in planned if ordeal not in lines]
            say(f"{len(planned) - len(left)} of {len(planned)} faults are in {self.record}; run folders: {self.home}")
            self._pass_all(left, lines, len(planned), say)
        return CampaignResult([lines[ordeal] for ordeal in planned], skipped)

    def _known(self) -> dict[Ordeal, PassedOrdeal]:
        """Return the record's lines of the present code. Changed files may differ from those of an earlier program."""
        if self.commit == UNKNOWN or self.commit.endswith(DIRTY):
            return {}
        code = (self.commit, self.torch)
        return {passed.fault: passed for passed in read(self.record) if (passed.commit, passed.torch) == code}

    def _pass_all(
        self, left: Sequence[Ordeal], lines: dict[Ordeal, PassedOrdeal], count: int, say: Callable[[str], None]
    ) -> None:
        """Pass faults one by one, and add their lines to `lines` and to the record. `count` includes earlier lines."""
        self.record.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for number, ordeal in enumerate(left, start=1):
            passed = self.passed(ordeal)
            if commit() != self.commit:
                raise CampaignFailed(f"the code was {self.commit} and is now {commit()}: start the campaign again")
            append(self.record, passed)
            lines[ordeal] = passed
            if passed.wrong:
                self._keep(ordeal)
            each_s = (time.monotonic() - began) / number
            result = "; ".join(passed.wrong) or "as it should"
            say(
                f"{count - len(left) + number} of {count}: {ordeal.kind}, rank {ordeal.fault.rank} of "
                f"{ordeal.layout}, {passed.seconds:.0f} s: {result}; about {(len(left) - number) * each_s / 60:.0f} "
                f"min left"
            )

    def passed(self, ordeal: Ordeal) -> PassedOrdeal:
        """Let a run pass through an ordeal."""
        undisturbed = self.undisturbed(ordeal.layout)
        run = self._new_run(self._disturbed, ordeal.layout)
        began = time.monotonic()
        codes = ordeals.run_supervised(run, ordeal.layout, self.disk, ordeal.fault)
        seconds = time.monotonic() - began
        failures = wrong(run, ordeal, codes)
        differences = self.compare(undisturbed, run)
        return PassedOrdeal(
            commit=self.commit,
            torch=self.torch,
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

    @property
    def _disturbed(self) -> Path:
        return self.home / "disturbed"

    def _keep(self, ordeal: Ordeal) -> None:
        """Rename the folder of a run that ended wrongly; a later run would remove it."""
        kind = ordeal.kind.replace(" ", "-")
        kept = self.home / f"wrong-{time.strftime('%Y%m%d-%H%M%S')}-{ordeal.layout}-{kind}"
        self._disturbed.rename(kept)

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
        """Return a layout's undisturbed run, which is trained before the layout's first fault."""
        home = self.home / f"undisturbed-{layout}"
        if layout in self.trained:
            return Run(home, self._arguments(layout), STEPS[layout])
        run = self._new_run(home, layout)
        codes = ordeals.run_supervised(run, layout, self.disk)
        if any(codes) or faults.read(run.folder) or "CHECKPOINT NOT WRITTEN" in log_of(run):
            raise CampaignFailed(f"the undisturbed run of {layout} has failed: see {run.home / 'task-0.log'}")
        self.trained.add(layout)
        return run

    def _new_run(self, home: Path, layout: str) -> Run:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        return Run(home, self._arguments(layout), STEPS[layout])

    def _arguments(self, layout: str) -> tuple[str, ...]:
        data = self.home / "data"
        if not (data / "manifest.json").exists():
            write_data(data)
        return ordeals.arguments(data, layout, self.disk)


@contextmanager
def _locked(home: Path) -> Generator[None]:
    """Lock the folder of all runs. Raises CampaignFailed if another program uses it."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CampaignFailed(f"another program uses {home}: wait for its end, or work in another folder") from None
        yield


def write_page(result: CampaignResult, count: int, page: Path | None) -> None:
    """Print a report of a campaign, and write it to the file `page` if it is not None."""
    from hybridtron.proving.measuring import BenchReport, publish

    passed = result.passed
    commits = ", ".join(dict.fromkeys(each.commit for each in passed))
    settings = (
        f"run.timeout is {TIMEOUT_S:g} s; a checkpoint every {EVERY} steps, a local one every {LOCAL_EVERY} steps, "
        f"written synchronously; forward passes of a slow rank take {1 + SLOWER:g} times as long"
    )
    notes = [f"commits: {commits}", settings, verdict(passed, count)]
    if result.skipped:
        notes.append(SKIPPED + ", ".join(result.skipped))
    report = BenchReport("Ordeals", notes=notes)
    report.table("by ordeal", SUMMARY_HEADER, [summary(kind, passed) for kind in KINDS])
    report.table("faults", HEADER, [each.cells() for each in passed])
    publish(report, "hybridtron chaos --ordeals", page)


def verdict(passed: Sequence[PassedOrdeal], count: int) -> str:
    """Return the page's line about the result."""
    silent = sum(not each.noticed for each in passed)
    late = sum(not 0 <= each.after <= each.limit for each in passed)
    unequal = sum(not each.equal for each in passed)
    bad = sum(bool(each.wrong) for each in passed)
    return (
        f"{len(passed)} of {count} faults: {silent} not noticed, {late} noticed too early or late, {unequal} with "
        f"an end other than the undisturbed run's, {bad} with anything wrong"
    )


def summary(kind: str, passed: Sequence[PassedOrdeal]) -> tuple[str, ...]:
    """Return a kind's row in the table by ordeal, for the columns of SUMMARY_HEADER."""
    of_kind = [each for each in passed if each.ordeal == kind]
    layouts = ", ".join(dict.fromkeys(each.layout for each in of_kind))
    slowest = max((each.after / each.limit for each in of_kind if each.noticed), default=0.0)
    lost = [""] * len(LOST)
    if kind not in UNRECORDED:
        lost = [f"{sum(each.lost.get(cause, 0.0) for each in of_kind):.1f} s" for cause in LOST]
    good = sum(not each.wrong for each in of_kind)
    return (kind, str(len(of_kind)), layouts, f"{slowest:.0%}", *lost, str(good))


class CampaignFailed(Exception):
    """Raised when an undisturbed run fails, or when the campaign can't be trusted or can't have its folder."""
