"""Runs parts of the queue, each in its own process with a time limit, and writes their first and last rows.

A part is done for a card if an attempt on it succeeded with the same digest of the code. Parts that were never tried
with this digest come first, in the list's order, then those that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtron.proving.gpu.queue.parts import QueuePart
from hybridtron.proving.gpu.queue.rows import DONE, FAILED, LEFT_OUT, WHY_CHARACTERS, PartAttempt, Row, append, reason
from hybridtron.requirements import is_there

TIMED_OUT = 124
REHEARSED_S = 120  # the limit of a part with tiny sizes, on a machine that may be slow and busy
MARGIN_S = 0.5  # time to end a part's process, in addition to its limit


@dataclass(frozen=True)
class PartState:
    """State of a part on a card (done, failed, left out or undone), and the attempt that decides it."""

    part: QueuePart
    card: str
    state: str = "undone"
    attempt: PartAttempt | None = None


def state_of(part: QueuePart, card: str, known: Sequence[PartAttempt]) -> PartState:
    """Return a part's state by its attempts with the same digest on the same card: a successful one, else the last."""
    card_attempts = [attempt for attempt in known if attempt.part == part.name and attempt.begin["card"] == card]
    same = [attempt for attempt in card_attempts if attempt.begin["digest"] == part.digest]
    well = [attempt for attempt in same if attempt.state == DONE]
    if not same:
        return PartState(part, card)
    last = (well or same)[-1]
    return PartState(part, card, last.state, last)


def undone(parts: Sequence[QueuePart], card: str, known: Sequence[PartAttempt]) -> list[QueuePart]:
    """Return the parts that a run on this card takes, in order."""
    states = [state_of(part, card, known) for part in parts]
    failed = [state.part for state in states if state.state == FAILED]
    return [state.part for state in states if state.state not in (DONE, FAILED)] + failed


def missing(part: QueuePart) -> list[str]:
    """Return the distributions that the part needs and this machine lacks."""
    return [name for name in part.needs if not is_there(name)]


def launched(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a part's process group with its output in the log, and kill it at its limit. Returns the exit code."""
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a hanging kernel blocks every other signal
            process.wait()
            return TIMED_OUT


@dataclass
class QueueRun:
    """One run over parts until its time is up. `about` is in the first row of each part: card, commit, versions."""

    rows: Path
    about: Row
    seconds: float
    tiny: bool = False
    modelled: Path | None = None
    launch: Callable[[Sequence[str], Path, float], int] = launched
    clock: Callable[[], float] = time.monotonic
    show: Callable[[str], Any] = print
    ended: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.rows.with_suffix(".log")

    def take(self, parts: Sequence[QueuePart]) -> dict[str, str]:
        """Run every part whose limit fits into the remaining time. Returns the state in which each part ended."""
        start = self.clock()
        for part in parts:
            if lacking := [] if self.tiny else missing(part):
                self._begin(part)
                self._end(part, LEFT_OUT, f"needs {', '.join(lacking)}")
                continue
            seconds_left = self.seconds - (self.clock() - start)
            limit = self._limit(part)
            if limit + MARGIN_S > seconds_left:
                self.show(f"{part.name}: not begun, its limit of {limit} s is more than the {seconds_left:.0f} s left")
                continue
            self.show(f"{part.name}: at most {limit} s of the {seconds_left:.0f} s left")
            self._measure(part)
        return self.ended

    def _measure(self, part: QueuePart) -> None:
        """Run one part in its process, and write its first and last rows."""
        self._begin(part)
        printed = self.log.stat().st_size if self.log.exists() else 0
        start = self.clock()
        try:
            code = self.launch(self._command(part), self.log, self._limit(part))
        except OSError as error:
            self._end(part, FAILED, reason(error))
            return
        seconds = self.clock() - start
        if code == 0:
            self._end(part, DONE, "", seconds)
        elif code == TIMED_OUT:
            self._end(part, FAILED, f"took longer than {self._limit(part)} s", seconds)
        else:
            self._end(part, FAILED, f"exit code {code}: {self._last_lines(printed)}", seconds)

    def _limit(self, part: QueuePart) -> int:
        if self.tiny:
            return REHEARSED_S
        return part.limit_s

    def _command(self, part: QueuePart) -> list[str]:
        command = [sys.executable, "-m", f"{__package__}.child", part.name, str(self.rows)]
        command += ["--tiny"] if self.tiny else []
        return command + (["--modelled", str(self.modelled)] if self.modelled else [])

    def _begin(self, part: QueuePart) -> None:
        first = {"part": part.name, "is": "begin", "digest": part.digest, "limit_s": part.limit_s, "at": time.time()}
        append(self.rows, {**first, **self.about})

    def _end(self, part: QueuePart, state: str, why: str, seconds: float = 0.0) -> None:
        self.ended[part.name] = state
        append(self.rows, {"part": part.name, "is": "end", "state": state, "why": why, "seconds": round(seconds, 1)})
        self.show(f"{part.name}: {state} after {seconds:.0f} s{f', {why}' if why else ''}")

    def _last_lines(self, printed: int) -> str:
        """Return the end of the part's output."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(printed)
            return file.read().decode(errors="replace").strip()[-WHY_CHARACTERS:]
