"""Ends a process that makes no progress: a loader that hangs, a collective in which a rank is missing, a dead disk.

Training says what it is about to do (`beat`), and each of these must end within `run.timeout`. If one does not, the
stacks of all Python threads go to logs/stacks-RANK.txt, those of the loader's worker processes to stderr, the failure
is recorded, and the process ends with exit code 1 at once, so that nothing it is stuck in can hold it. A launcher then
ends the other ranks, and the next start resumes.
Where the interpreter itself is stuck, faulthandler's own thread does the same a little later, without a word in
outcome.json.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Self

from hybridtron.data.loader import STACKS
from hybridtron.train.failures import Failures, process_fault, waits_for_others

BACKSTOP_S = 4.0  # past run.timeout: faulthandler ends a stuck interpreter, before a launcher that lost another rank
LAST_WORDS_S = 10.0  # what it may take to put a failure down
WORKERS_S = 0.5  # what its worker processes get to write their stacks
LOADING = "/torch/utils/data/dataloader.py"  # on the stack of what waits for them


class Watchdog:
    """Watches this process from its start as a context to its end."""

    def __init__(self, failures: Failures, timeout_s: float) -> None:
        self.failures, self.timeout_s = failures, timeout_s
        self.path = failures.run_dir / "logs" / f"stacks-{failures.rank}.txt"
        self._ended = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")
        self.beat("the start")
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with suppress(FileNotFoundError):
            if not self.path.stat().st_size:
                self.path.unlink()

    def beat(self, doing: str, at_least_s: float = 0.0) -> None:
        """What comes now must end before `run.timeout`, or `at_least_s` if that is more."""
        patience = max(self.timeout_s, at_least_s)
        self._doing = (doing, patience, time.monotonic() + patience)
        faulthandler.dump_traceback_later(patience + BACKSTOP_S, exit=True, file=self._file)

    def overdue(self) -> str | None:
        """That what was to end by now has not."""
        doing, patience, deadline = self._doing
        if time.monotonic() <= deadline:
            return None
        return f"{doing} did not end within {patience:g} s (run.timeout)"

    def _watch(self) -> None:
        tick = min(1.0, self.timeout_s / 20)
        while not self._ended.wait(tick):
            if (reason := self.overdue()) is not None:
                self._end(reason)

    def _end(self, reason: str) -> None:
        faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=self._file)
        try:
            workers = multiprocessing.active_children()
            self._record(reason, workers)
            _end_all(workers)  # one that hangs would stay behind
        finally:
            os._exit(1)

    def _record(self, reason: str, workers: Sequence[BaseProcess]) -> None:
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(self._main))]
        waiting = waits_for_others(frames)
        reason = "; ".join([f"{reason}; the main thread is {_where(frames)}", *_faults(workers)])
        self.failures.log("stacks", reason)
        faulthandler.dump_traceback(self._file)
        first, first_reason = self.failures.report(reason, waiting)
        reported = reason if first == self.failures.rank else f"{reason}; rank {first} failed first: {first_reason}"
        os.write(2, f"rank {self.failures.rank}: {reported}\nstacks: {self.path}\n".encode())


def _where(frames: Sequence[FrameType]) -> str:
    """What a thread is doing, by its stack, the innermost call first."""
    if waits_for_others(frames):
        return "waiting for other ranks"
    if any(frame.f_code.co_filename.endswith(LOADING) for frame in frames):
        return "waiting for a worker process of the loader"
    return f"in {frames[0].f_code.co_name}" if frames else "ended"


def _faults(workers: Sequence[BaseProcess]) -> list[str]:
    """Which worker processes are gone or stopped."""
    pids = [worker.pid for worker in workers if worker.pid is not None]
    return [f"worker process {pid} {fault}" for pid in pids if (fault := process_fault(pid)) is not None]


def _end_all(workers: Sequence[BaseProcess]) -> None:
    """Let worker processes dump their stacks, and end them."""
    for worker in workers:
        if worker.pid is not None:
            with suppress(OSError):
                os.kill(worker.pid, STACKS)
    time.sleep(WORKERS_S if workers else 0)
    for worker in workers:
        worker.kill()
