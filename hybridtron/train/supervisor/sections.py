"""Sections of a rank's work: the rank announces each section to its supervisor, which limits the section's duration.

A rank announces its work through a pipe, a line for each piece of work. The supervisor measures how long each piece
takes. Once a section in LEAST has had MEASURED pieces of work, its time limit is FACTOR times the longest one, at least
a share of `run.timeout`, and at most `run.timeout`. Until then, and in all other sections, the limit is `run.timeout`,
or START_S for a start if that is longer: a start may restore a checkpoint of any size, and the work at the ends of
phases differs. A rank ends itself at this limit, so its supervisor waits for PATIENCE_S more seconds.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

VARIABLE = "HYBRIDTRON_SECTIONS"  # environment variable: the pipe's file descriptor in the rank's process
FACTOR = 5.0  # nvidia-resiliency-ext multiplies by the same number
MEASURED = 2  # pieces of work before a section's own time limit applies
START_S = 300.0  # seconds for a start, or run.timeout if that is longer
PATIENCE_S = 15.0  # seconds after run.timeout in which the rank's own watchdog ends it; its report says more
STEPS = 64  # number of last steps whose median is the time of a step
LINE_BYTES = 4096  # writes of at most this size to a pipe are atomic


class Section(StrEnum):
    """Kind of a rank's work."""

    start = "start"  # launch, model, and the first step of a start or a phase
    resume = "resume"  # a start, phase or rollback that restores a checkpoint
    step = "step"
    save = "save"  # the part of a checkpoint for which training waits
    local_save = "local_save"  # the same part of a local checkpoint; it does not depend on the run's file system
    settle = "settle"  # the wait for a checkpoint that is written in the background
    evaluation = "evaluation"
    export = "export"  # exports and other work at the end of a phase or run


# section -> shortest time limit, as a share of run.timeout; a file system may stall a step or a save for minutes, and
# parts of an evaluation differ
LEAST = {Section.step: 0.1, Section.save: 0.2, Section.local_save: 0.2, Section.evaluation: 0.5}


class SectionWork(NamedTuple):
    """A piece of a rank's work.

    section: the kind of work
    step: the last step that the rank has finished
    doing: description, such as `step 12`
    """

    section: Section
    step: int
    doing: str


class SectionPipe:
    """The rank's end of the pipe to its supervisor; without a supervisor nothing is written."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.file: int | None = None
        if VARIABLE in environment:
            self.file = int(environment[VARIABLE])
            os.set_inheritable(self.file, False)  # workers of the loader must not keep the pipe open
            os.set_blocking(self.file, False)  # a supervisor that was suspended must not stop the rank

    def announce(self, work: SectionWork) -> None:
        """Send the supervisor a line: this piece of work begins, and the last one has ended."""
        if self.file is not None:
            line = f"{work.section} {work.step} {' '.join(work.doing.split())}".encode()[: LINE_BYTES - 1]
            with suppress(OSError):
                os.write(self.file, line + b"\n")


def parse(line: str) -> SectionWork:
    """Read a line that `SectionPipe.announce` has written."""
    section, step, doing = line.split(" ", 2)
    return SectionWork(Section(section), int(step), doing)


@dataclass
class SectionClock:
    """Clock of one rank's work: the present piece of work, and each section's longest duration so far.

    timeout_s: run.timeout
    """

    timeout_s: float

    def __post_init__(self) -> None:
        self.work = SectionWork(Section.start, 0, "the launch")
        self.since = 0.0  # the time at which this work began, in seconds on the monotonic clock
        self.longest: dict[Section, float] = {}
        self.measured: Counter[Section] = Counter()
        self.steps: deque[float] = deque(maxlen=STEPS)
        self.resumes = False  # True if this start restores a checkpoint
        self.has_trained = False  # True once this start has finished its first step

    def restart(self, now: float, resumes: bool) -> None:
        """Begin again with a new process, which is launching. `resumes` is True if the run has a checkpoint."""
        self.has_trained = False
        self.resumes = resumes
        self.work = SectionWork(self._kind(Section.start), 0, "the launch")
        self.since = now

    def begin(self, work: SectionWork, now: float) -> bool:
        """Begin a piece of work, and so end the last one; return True if this ends the first step of a start."""
        spent = now - self.since
        self._measure(spent)
        if self.work.section is Section.step:
            self.steps.append(spent)
        first = not self.has_trained and work.section not in (Section.start, Section.resume)
        self.has_trained = self.has_trained or first
        self.work = work._replace(section=self._kind(work.section))
        self.since = now
        return first

    def limit(self) -> float:
        """Return the time limit of the present section in seconds."""
        section = self.work.section
        most = self.timeout_s
        if section in (Section.start, Section.resume):
            most = max(most, START_S)
        if section not in LEAST or self.measured[section] < MEASURED:
            return most + PATIENCE_S
        return min(most + PATIENCE_S, max(LEAST[section] * self.timeout_s, FACTOR * self.longest[section]))

    def give_up(self, now: float) -> None:
        """Count an overdue piece of work as measured. If its limit was too short, the next limit is longer."""
        self._measure(now - self.since)

    def step_s(self) -> float:
        """Return the median time of a step in seconds; 0 before the first."""
        if not self.steps:
            return 0.0
        return statistics.median(self.steps)

    def _measure(self, seconds: float) -> None:
        section = self.work.section
        self.longest[section] = max(self.longest.get(section, 0.0), seconds)
        self.measured[section] += 1

    def _kind(self, section: Section) -> Section:
        """Return `resume` in place of `start` if this start restores a checkpoint and has not done a step yet."""
        if section is Section.start and self.resumes and not self.has_trained:
            return Section.resume
        return section
