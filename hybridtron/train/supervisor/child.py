"""The process of a rank, which its supervisor starts, watches and ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hybridtron.train.outcome import process_fault
from hybridtron.train.supervisor.sections import VARIABLE, Section, SectionClock, parse

STACKS = signal.SIGUSR2  # makes a rank write its stacks to logs/stacks-RANK.txt (watchdog.py)
PR_SET_PDEATHSIG = 1  # of prctl(2)
KILL_S = 15.0  # seconds for a killed process to disappear, less than lines.SILENCE_S; a driver or disk may keep it
# variables of torchrun that make a rank use torchrun's store, which keeps the keys of an earlier start, and watch
# torchrun, which the supervisor does
DROPPED = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


class Child:
    """A rank's process, in a session of its own, so that its loader workers can be ended with it.

    The kernel kills the process if the supervisor dies, so a supervisor never leaves an orphan.
    """

    def __init__(self, clock: SectionClock, variables: Mapping[str, str]) -> None:
        self.clock = clock
        self.has_announced = False  # True once the rank has announced work, and so handles STACKS
        self.pieces = 0  # number of pieces of work that all ranks announce; a rank with fewer pieces lags behind
        self.first_step = 0  # the step from which this start resumed
        reading, writing = os.pipe()
        self.pipe = reading
        os.set_blocking(reading, False)
        self._unread = b""
        inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
        self.process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**inherited, **variables, VARIABLE: str(writing)},
            pass_fds=[writing],
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
        os.close(writing)

    def listen(self, now: float) -> bool:
        """Read what the rank has announced; return True if it has just finished the first step of this start."""
        with suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 2**16):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        first = False
        for line in lines:
            work = parse(line.decode(errors="replace"))
            self.has_announced = True
            self.pieces += is_counted(work.section, self.clock.work.section)
            if self.clock.begin(work, now):
                first = True
                self.first_step = work.step - 1
        return first

    @property
    def elapsed(self) -> float:
        """Seconds since the present piece of work began."""
        return time.monotonic() - self.clock.since

    def report(self) -> dict[str, Any]:
        """Describe the rank's work."""
        clock = self.clock
        work = {"section": clock.work.section, "doing": clock.work.doing, "step": clock.work.step}
        times = {"elapsed": self.elapsed, "limit": clock.limit(), "step_s": clock.step_s()}
        return {**work, **times, "pieces": self.pieces, "fault": process_fault(self.process.pid) or ""}

    def forward(self, number: int) -> None:
        """Send a signal to the rank, but not to its workers."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> int | None:
        """Kill the rank and its workers. Returns its exit code, or None if the process does not disappear."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(KILL_S)
        return None

    def close(self) -> None:
        os.close(self.pipe)


def is_counted(section: Section, before: Section) -> bool:
    """Return True if all ranks announce this piece of work.

    Pieces of a start are not counted. Only the first piece of an evaluation or an export is counted.
    """
    if section in (Section.start, Section.resume):
        return False
    return section is not before or section not in (Section.evaluation, Section.export)


def _die_with_parent() -> Any:
    """Return a function that makes the kernel kill this process when its parent dies; None if there is no prctl."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return die_with_parent
