"""Runs parts of the queue, each in its own process with a time limit, and writes their first and last rows.

The queue is a list of parts. A part is a group of measurements. A row is a JSON line in a results file (`rows.py`). The
part's process writes the rows with measurements between the first and the last row.

A card is a kind of GPU. A digest identifies the measured code. A part is done for a card if an attempt on this card
succeeded with the current code. Parts without an attempt with the current code run first, in the list's order. Parts
whose attempts failed run last.
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
REHEARSED_S = 120  # time limit for a part with tiny sizes, on any machine
MARGIN_S = 0.5  # time for ending a part's process after its limit


@dataclass(frozen=True)
class PartState:
    """A part's state on a card: done, failed, left out or undone.

    `attempt` is the attempt with this state, or None for an undone part.
    """

    part: QueuePart
    card: str
    state: str = "undone"
    attempt: PartAttempt | None = None


def state_of(part: QueuePart, card: str, known: Sequence[PartAttempt]) -> PartState:
    """Return a part's state on a card.

    Only attempts with the current digest count. The last successful attempt determines the state. If no attempt was
    successful, the last attempt determines the state. If there is no attempt, the part is undone.
    """
    card_attempts = [attempt for attempt in known if attempt.part == part.name and attempt.begin["card"] == card]
    current = [attempt for attempt in card_attempts if attempt.begin["digest"] == part.digest]
    successful = [attempt for attempt in current if attempt.state == DONE]
    if not current:
        return PartState(part, card)
    last = (successful or current)[-1]
    return PartState(part, card, last.state, last)


def undone(parts: Sequence[QueuePart], card: str, known: Sequence[PartAttempt]) -> list[QueuePart]:
    """Return the parts that are not done on this card. Failed parts come last."""
    states = [state_of(part, card, known) for part in parts]
    failed = [state.part for state in states if state.state == FAILED]
    return [state.part for state in states if state.state not in (DONE, FAILED)] + failed


def missing(part: QueuePart) -> list[str]:
    """Return the distributions that the part needs and this machine lacks."""
    return [name for name in part.needs if not is_there(name)]


def run_part(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command in a new process group, with its output in `log`. Return the exit code.

    After `limit_s` seconds the process group is killed, and the exit code is TIMED_OUT.
    """
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # SIGKILL, because a process that waits for a hanging kernel does not handle other signals
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return TIMED_OUT


@dataclass
class QueueRun:
    """One run over the parts in the queue, with a time limit.

    rows      file to which all rows are appended
    about     card, commit and versions, which are added to each part's first row
    seconds   time limit for the run
    tiny      whether sizes are tiny
    modelled  file with modelled times, if available
    launch    function that runs a part's command (`run_part`)
    clock     function that returns the time in seconds
    show      function that prints a line about the progress
    ended     state in which each part ended, by name
    """

    rows: Path
    about: Row
    seconds: float
    tiny: bool = False
    modelled: Path | None = None
    launch: Callable[[Sequence[str], Path, float], int] = run_part
    clock: Callable[[], float] = time.monotonic
    show: Callable[[str], Any] = print
    ended: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.rows.with_suffix(".log")

    def take(self, parts: Sequence[QueuePart]) -> dict[str, str]:
        """Run every part whose time limit fits into the remaining time. Return the states by part."""
        start = self.clock()
        for part in parts:
            if lacking := [] if self.tiny else missing(part):
                self._begin(part)
                self._end(part, LEFT_OUT, f"needs {', '.join(lacking)}")
                continue
            seconds_left = self.seconds - (self.clock() - start)
            limit = self._limit(part)
            if limit + MARGIN_S > seconds_left:
                self.show(f"{part.name}: skipped, because its limit of {limit} s exceeds the {seconds_left:.0f} s left")
                continue
            self.show(f"{part.name}: running for at most {limit} s; {seconds_left:.0f} s left for all parts")
            self._measure(part)
        return self.ended

    def _measure(self, part: QueuePart) -> None:
        """Run one part in its own process, and write the attempt's first and last row."""
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
        """Return the end of the log without its first `printed` bytes, which earlier parts have printed."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(printed)
            return file.read().decode(errors="replace").strip()[-WHY_CHARACTERS:]
