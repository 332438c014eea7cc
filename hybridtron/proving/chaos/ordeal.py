"""Runs training under faults: restarts it each time it ends, until it has finished, and records every fault."""

from __future__ import annotations

import json
import random
import textwrap
import time
from dataclasses import dataclass

from rich.progress import Progress, TaskID

from hybridtron.proving.chaos.faults import FULL_DISK, Disk, Scene, strike
from hybridtron.proving.chaos.run import PROCESSES, SAVE_EVERY, START_S, TIMEOUT_S, TOGETHER_S, ProcessStart, Run

LOOK_S = 0.02  # polling interval
MOST_WORDS = 150  # characters shown of a reason; run/outcome.json and rank-N.log have all of it
HEADER = ("after step", "fault", "what was hit", "how the run ended", "after", "resumed from")


class OrdealFailed(Exception):
    """Raised when a run stalls, ends without a fault, or needs too many starts."""


@dataclass
class Injected:
    """One injected fault and its outcome."""

    step: int
    kind: str
    hit: str
    at: float
    ended: str = ""
    seconds: float = 0.0
    resumed: int | None = None

    def cells(self) -> tuple[str, ...]:
        if self.resumed is None:
            resumed = ""
        else:
            resumed = f"step {self.resumed}"
        after = f"{self.seconds / TIMEOUT_S:.2f} time-outs"
        return (str(self.step), self.kind, self.hit, self.ended, after, resumed)


class Ordeal:
    """Starts a run until it has finished, and injects a fault every `mean` steps on average; none if `mean` is
    infinite.
    """

    def __init__(self, run: Run, mean: float, draw: random.Random, disk: Disk) -> None:
        self.run = run
        self.mean = mean
        self.draw = draw
        self.disk = disk
        self.kinds_left, self.faults = list[str](), list[Injected]()
        self.done = self.starts = 0  # steps done, including lost ones
        self.due = self._next(0)
        # step count at which the disk is freed; saves that failed before it filled
        self.full_until = float("inf")
        self.unwritten = 0

    def _next(self, now: int) -> float:
        return now + self.mean * self.draw.expovariate(1.0)

    def survive(self, progress: Progress) -> None:
        """Start the run until it has finished. Raises OrdealFailed."""
        bar = progress.add_task(self.run.home.name, total=self.run.steps)
        max_starts = 10 + 5 * self.run.steps / self.mean
        while True:
            self.starts += 1
            if self.starts > max_starts:
                raise OrdealFailed(f"{self.run.home} has not finished in {max_starts:.0f} starts")
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
        """Inject due faults until all processes have ended, or one has failed and the others had time to end.

        Raises OrdealFailed if the run makes no progress.
        """
        line_count = 0
        moved = time.monotonic()
        failed = None
        while len(codes := started.codes) < PROCESSES:
            now = time.monotonic()
            new_count = len(started.new_lines())
            if new_count != line_count:
                line_count = new_count
                moved = now
                description = f"{self.run.home.name}, {len(self.faults)} faults"
                progress.update(bar, completed=len(self.run.lines()), description=description)
            if any(codes):
                failed = failed or now
                if now > failed + TOGETHER_S:
                    return
            elif now > moved + (2 * TIMEOUT_S if line_count else START_S):
                raise OrdealFailed(
                    f"{self.run.home} has not moved for {now - moved:.0f} s; run.timeout is {TIMEOUT_S:g} s"
                )
            elif new_count:
                self._strike(started, self.done + new_count)
            time.sleep(LOOK_S)

    def _strike(self, started: ProcessStart, done: int) -> None:
        """Inject a fault if one is due after this number of steps."""
        if done >= self.full_until:
            self._free()
        pending = self.faults and not self.faults[-1].ended and self.faults[-1].kind != FULL_DISK
        if done < self.due or pending:
            return
        time.sleep(self.draw.random() * 5 * LOOK_S)  # a random moment within a step
        step = len(self.run.lines())
        at = time.monotonic()
        fault = strike(Scene(started, self.disk, self.draw), self.kinds_left)
        self.due = self._next(done)
        if fault is not None:
            self.faults.append(Injected(step, *fault, at))
            if fault[0] == FULL_DISK:
                self.full_until, self.unwritten = done + 2 * SAVE_EVERY, self._failed_saves()

    def _free(self) -> None:
        self.disk.free()
        self.full_until = float("inf")
        for fault in self.faults:
            if fault.kind == FULL_DISK and not fault.ended:
                fault.ended = f"kept training; failed saves logged by then: {self._failed_saves() - self.unwritten}"
                fault.seconds = time.monotonic() - fault.at

    def _failed_saves(self) -> int:
        return (self.run.home / "rank-0.log").read_text().count("CHECKPOINT NOT WRITTEN")

    def _conclude(self, started: ProcessStart, codes: list[int], struck: int) -> None:
        """Record how a start ended and where it had resumed. Raises OrdealFailed if it ended without a fault."""
        new = started.new_lines()
        self.done += len(new)
        if new:
            for fault in self.faults[:struck]:
                if fault.resumed is None and not fault.ended.startswith("kept training"):
                    fault.resumed = json.loads(new[0])["step"] - 1
        outcome = described(self.run)
        if any(codes) and len(self.faults) == struck and self.full_until == float("inf"):
            raise OrdealFailed(f"{self.run.home} ended though nothing had happened to it: {outcome}")
        if self.full_until != float("inf"):
            self._free()
        for fault in self.faults:
            if not fault.ended:
                fault.ended, fault.seconds = outcome, time.monotonic() - fault.at


def described(run: Run) -> str:
    """Describe how a start ended, from its outcome.json; a run that was killed outright has none."""
    outcome = run.outcome()
    match outcome.get("outcome"):
        case "preempted":
            return f"saved at step {outcome['step']}"
        case "failed":
            return textwrap.shorten(str(outcome["reason"]), MOST_WORDS, placeholder=" ...")
        case "finished":
            return "finished"
    return "killed outright"
