"""Runs training under faults: restarts the processes until all steps are trained, and records every fault."""

from __future__ import annotations

import json
import random
import textwrap
import time
from dataclasses import dataclass

from rich.progress import Progress, TaskID

from hybridtron.proving.chaos.faults import FULL_DISK, Disk, FaultContext, inject_fault
from hybridtron.proving.chaos.training_run import (
    PROCESSES,
    SAVE_EVERY,
    START_S,
    TIMEOUT_S,
    TOGETHER_S,
    ProcessStart,
    Run,
)

POLL_INTERVAL_S = 0.02
MAX_REASON_CHARACTERS = 150  # longer reasons are shortened; run/outcome.json and rank-N.log have the full reason
# columns of the table that lists the faults
HEADER = ("after step", "fault", "what was hit", "how the run ended", "after", "resumed from")


class FaultRunFailed(Exception):
    """Raised when a run stalls, fails without an injected fault, or needs too many starts."""


@dataclass
class Injected:
    """One injected fault and its outcome. A start is one launch of all the run's processes.

    step     how many steps were trained when the fault was injected
    kind     kind of fault, a key of `faults.KINDS`
    hit      target of the fault, such as `rank 1`
    at       time when the fault was injected, by the monotonic clock
    ended    how the start with this fault ended; empty while the fault is pending
    seconds  time from the injection until the processes of this start ended, or until a full disk was freed
    resumed  step from which the next start resumed; None if no later start trained
    """

    step: int
    kind: str
    hit: str
    at: float
    ended: str = ""
    seconds: float = 0.0
    resumed: int | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the fault's row in the report's table, for the columns of HEADER."""
        if self.resumed is None:
            resumed = ""
        else:
            resumed = f"step {self.resumed}"
        after = f"{self.seconds / TIMEOUT_S:.2f} time-outs"
        return (str(self.step), self.kind, self.hit, self.ended, after, resumed)


class FaultRun:
    """A run that is started repeatedly until all steps are trained, with a fault every `mean` steps on average.

    An infinite `mean` gives no faults.
    """

    def __init__(self, run: Run, mean: float, draw: random.Random, disk: Disk) -> None:
        self.run = run
        self.mean = mean
        self.draw = draw
        self.disk = disk
        self.kinds_left, self.faults = list[str](), list[Injected]()
        self.done = self.starts = 0  # `done`: steps trained in all starts, including steps that were lost and repeated
        self.due = self._next(0)  # value of `done` at which the next fault is injected
        self.full_until = float("inf")  # value of `done` at which a full disk is freed; infinite if no disk is full
        self.unwritten = 0  # number of failed saves before the disk was filled

    def _next(self, done: int) -> float:
        return done + self.mean * self.draw.expovariate(1.0)

    def survive(self, progress: Progress) -> None:
        """Start the run repeatedly until all steps are trained.

        Raises FaultRunFailed if the run stalls, fails without an injected fault, or needs too many starts.
        """
        bar = progress.add_task(self.run.home.name, total=self.run.steps)
        max_starts = 10 + 5 * self.run.steps / self.mean
        while True:
            self.starts += 1
            if self.starts > max_starts:
                raise FaultRunFailed(
                    f"{self.run.home} has not finished in {max_starts:.0f} starts: see rank-0.log in this folder"
                )
            started = ProcessStart(self.run)
            fault_count = len(self.faults)
            try:
                self._watch(started, progress, bar)
            finally:
                codes = started.codes
                started.kill()
            self._conclude(started, codes, fault_count)
            if codes == [0] * PROCESSES:
                return

    def _watch(self, started: ProcessStart, progress: Progress, bar: TaskID) -> None:
        """Inject faults that are due, until all processes have ended.

        Once a process has failed, return after TOGETHER_S seconds even if other processes are still running. Raises
        FaultRunFailed if the run makes no progress.
        """
        line_count = 0
        last_progress = time.monotonic()
        failed_at = None
        while len(codes := started.codes) < PROCESSES:
            now = time.monotonic()
            new_count = len(started.new_lines())
            if new_count != line_count:
                line_count = new_count
                last_progress = now
                description = f"{self.run.home.name}, {len(self.faults)} faults"
                progress.update(bar, completed=len(self.run.lines()), description=description)
            if any(codes):
                failed_at = failed_at or now
                if now > failed_at + TOGETHER_S:
                    return
            elif now > last_progress + (2 * TIMEOUT_S if line_count else START_S):
                raise FaultRunFailed(
                    f"{self.run.home} has trained no step for {now - last_progress:.0f} s, although run.timeout is "
                    f"{TIMEOUT_S:g} s: see rank-0.log in this folder"
                )
            elif new_count:
                self._inject_if_due(started, self.done + new_count)
            time.sleep(POLL_INTERVAL_S)

    def _inject_if_due(self, started: ProcessStart, done: int) -> None:
        """Free a full disk if its time has come, and inject a fault if a fault is due after `done` steps.

        A fault is pending until its outcome is recorded. While a fault is pending, no other fault is injected. The only
        exception is a full disk: further faults are injected while the disk is full.
        """
        if done >= self.full_until:
            self._free()
        pending = self.faults and not self.faults[-1].ended and self.faults[-1].kind != FULL_DISK
        if done < self.due or pending:
            return
        # sleep for up to 5 polling intervals, so that the fault comes at a random moment within a step
        time.sleep(self.draw.random() * 5 * POLL_INTERVAL_S)
        step = len(self.run.lines())
        at = time.monotonic()
        fault = inject_fault(FaultContext(started, self.disk, self.draw), self.kinds_left)
        self.due = self._next(done)
        if fault is not None:
            self.faults.append(Injected(step, *fault, at))
            if fault[0] == FULL_DISK:
                self.full_until, self.unwritten = done + 2 * SAVE_EVERY, self._failed_saves()

    def _free(self) -> None:
        """Free the full disk, and record this fault's outcome."""
        self.disk.free()
        self.full_until = float("inf")
        for fault in self.faults:
            if fault.kind == FULL_DISK and not fault.ended:
                fault.ended = f"kept training; failed saves logged by then: {self._failed_saves() - self.unwritten}"
                fault.seconds = time.monotonic() - fault.at

    def _failed_saves(self) -> int:
        return (self.run.home / "rank-0.log").read_text().count("CHECKPOINT NOT WRITTEN")

    def _conclude(self, started: ProcessStart, codes: list[int], faults_before: int) -> None:
        """Record two outcomes after a start has ended:

        - for faults in this start: how the start ended
        - for faults in earlier starts: the step from which this start had resumed

        Raises FaultRunFailed if the start failed without an injected fault.
        """
        new = started.new_lines()
        self.done += len(new)
        if new:
            for fault in self.faults[:faults_before]:
                if fault.resumed is None and not fault.ended.startswith("kept training"):
                    fault.resumed = json.loads(new[0])["step"] - 1
        outcome = describe_end(self.run)
        if any(codes) and len(self.faults) == faults_before and self.full_until == float("inf"):
            raise FaultRunFailed(f"{self.run.home} failed without an injected fault: {outcome}")
        if self.full_until != float("inf"):
            self._free()
        for fault in self.faults:
            if not fault.ended:
                fault.ended, fault.seconds = outcome, time.monotonic() - fault.at


def describe_end(run: Run) -> str:
    """Describe how the run's last start ended, from outcome.json, which a killed run does not write."""
    outcome = run.outcome()
    match outcome.get("outcome"):
        case "preempted":
            return f"saved at step {outcome['step']}"
        case "failed":
            return textwrap.shorten(str(outcome["reason"]), MAX_REASON_CHARACTERS, placeholder=" ...")
        case "finished":
            return "finished"
    return "killed outright"
