"""Watchdog: a thread that ends a process which makes no progress.

A process may hang because of a stuck data loader, a collective in which a rank is missing, or a dead disk. Training
calls `beat` whenever a new part of its work begins, such as a step or a checkpoint. The next call must follow within
`run.timeout` seconds. If it does not, the watchdog

    1. writes the stacks of all Python threads to logs/stacks-RANK.txt, and the recent collectives to
       logs/collectives-RANK.json,
    2. records the failure in outcome.json, and prints it,
    3. makes the loader's worker processes write their stacks to stderr, and kills them,
    4. on the rank that has failed first: prints the first rank whose collectives differ (`collectives.py`),
    5. ends this process with exit code 1 by os._exit, which works even if the main thread is stuck in native code.

A launcher such as torchrun then ends the other ranks, and the next start resumes the run.

With `run.restarts` the calls of `beat` also reach this rank's supervisor, which limits the time of each section. At a
hang all supervisors send the signal STACKS to their ranks, which then write the same two files.

If the interpreter itself is stuck, the watchdog's thread can't run. For this case Python's faulthandler has a thread
that does not need the interpreter. BACKSTOP_S seconds after the time limit, this thread writes the stacks and ends the
process. It can't write outcome.json.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from types import FrameType, TracebackType
from typing import Self

from hybridtron.data.loader import STACKS
from hybridtron.parallel.recorded_calls import recorded_calls
from hybridtron.train.collectives import TOGETHER_S, compare_at_hang, write_calls
from hybridtron.train.jsonl import written_at
from hybridtron.train.outcome import Failures, process_fault, waits_for_others
from hybridtron.train.supervisor.sections import Section, SectionPipe, SectionWork

# Seconds after the time limit at which faulthandler ends the process. The number is small because the stacks must be
# written before a launcher that has lost another rank kills this process too.
BACKSTOP_S = 4.0
LAST_WORDS_S = 10.0  # seconds in which the watchdog must record a failure and end the process
FILES_S = 2.0  # seconds in which the other ranks must write their collectives
WORKERS_S = 0.5  # seconds for worker processes to write their stacks
LOADING = "/torch/utils/data/dataloader.py"  # the file whose functions wait for worker processes


class Watchdog:
    """Context manager that watches this process and ends it if it makes no progress.

    `pipe` leads to this rank's supervisor, if it has one. On the supervisor's signal STACKS this process writes its
    stacks and collectives.
    """

    def __init__(self, failures: Failures, timeout_s: float, pipe: SectionPipe) -> None:
        self.failures = failures
        self.timeout_s = timeout_s
        self.pipe = pipe
        self.path = failures.run_dir / "logs" / f"stacks-{failures.rank}.txt"
        self._ended = threading.Event()
        self._main = threading.get_ident()
        self._signal: SignalThread | None = None
        self._writing = threading.Lock()  # the watchdog and a signal may write the same file

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")
        if self.pipe.file is not None:
            self._signal = SignalThread(STACKS, self._write_calls)
            faulthandler.register(STACKS, self._file, chain=True)
        self.beat("the start", Section.start)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        if self._signal is not None:
            faulthandler.unregister(STACKS)
            self._signal.close()
            signal.signal(STACKS, signal.SIG_IGN)  # by default the signal would end this process
        self._file.close()
        with suppress(FileNotFoundError):
            if not self.path.stat().st_size:
                self.path.unlink()

    def beat(self, doing: str, section: Section, at_least_s: float = 0.0) -> None:
        """Announce the start of the work named `doing`, and the end of the work before it.

        The time limit of the new work is the larger of `run.timeout` and `at_least_s`, in seconds. A supervisor may
        have a shorter limit for work of this section.
        """
        self.pipe.announce(SectionWork(section, self.failures.progress.step or 0, doing))
        patience = max(self.timeout_s, at_least_s)
        # name of the work, time limit in seconds, deadline on the monotonic clock
        self._doing = (doing, patience, time.monotonic() + patience)
        faulthandler.dump_traceback_later(patience + BACKSTOP_S, exit=True, file=self._file)

    def overdue(self) -> str | None:
        """Return a message if the current part of the work has exceeded its time limit, else None."""
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
            is_first = self._record(reason, workers)
            _end_all(workers)  # a worker that hangs would outlive this process
            if is_first:
                self._compare_calls()  # last, because it reads the files of all ranks
        finally:
            os._exit(1)

    def _record(self, reason: str, workers: Sequence[BaseProcess]) -> bool:
        """Record and print the failure; return True if no other rank has failed first."""
        frames = self._frames()
        waiting = waits_for_others(frames)
        reason = "; ".join([f"{reason}; the main thread is {_where(frames)}", *_faults(workers)])
        self.failures.log("stacks", reason)
        faulthandler.dump_traceback(self._file)
        self._write_calls()
        first, first_reason = self.failures.report(reason, waiting)
        if first == self.failures.rank:
            reported = reason
        else:
            reported = f"{reason}; rank {first} failed first: {first_reason}"
        os.write(2, f"rank {self.failures.rank}: {reported}\nstacks: {self.path}\n".encode())
        return first == self.failures.rank

    def _compare_calls(self) -> None:
        """Print the first rank whose collectives differ. Ranks that exceed their time limits later write later."""
        logs = self.path.parent
        until = time.monotonic() + FILES_S
        while time.monotonic() < until and not self._all_have_written():
            time.sleep(0.1)
        if divergence := compare_at_hang(logs, time.time() - TOGETHER_S):
            os.write(2, f"rank {self.failures.rank}: collectives: {divergence.what}\n".encode())

    def _all_have_written(self) -> bool:
        """Return True if all ranks have written their collectives in this start."""
        ranks = range(len(self.failures.processes))
        times = [written_at(self.path.with_name(f"collectives-{rank}.json")) for rank in ranks]
        return all(at is not None and at >= self.failures.started * 1e9 for at in times)

    def _frames(self) -> list[FrameType]:
        """Return the main thread's stack, which begins with the innermost call."""
        return [frame for frame, _ in traceback.walk_stack(sys._current_frames().get(self._main))]

    def _write_calls(self) -> None:
        """Write this rank's recent collectives. Nothing may keep the watchdog from its work."""
        try:
            recorded = recorded_calls()
            recorded |= {"started": self.failures.started, "ranks": len(self.failures.processes)}
            if any(len(ranks) > 1 for ranks in recorded["groups"].values()):
                with self._writing:
                    write_calls(self.path.parent, self.failures.rank, recorded, waits_for_others(self._frames()))
        except Exception as error:
            os.write(2, f"rank {self.failures.rank}: its collectives can't be written: {error!r}\n".encode())


class SignalThread:
    """Thread that calls a function at each signal of a kind, even if the main thread is stuck in native code.

    Python runs the handler of a signal in the main thread, and only between two of its instructions. But at once it
    writes the signal's number into the pipe that `signal.set_wakeup_fd` names.
    """

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.number = number
        self.act = act
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        signal.signal(number, _ignore)  # without a handler in Python no number would be written
        self._before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        signal.set_wakeup_fd(self._before)
        os.close(self._writing)

    def _listen(self) -> None:
        with os.fdopen(self._reading, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] == self.number:
                    self.act()


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing at a signal."""


def _where(frames: Sequence[FrameType]) -> str:
    """Describe a thread's activity from the frames in its stack, which begin with the innermost call."""
    if waits_for_others(frames):
        return "waiting for other ranks"
    if any(frame.f_code.co_filename.endswith(LOADING) for frame in frames):
        return "waiting for a worker process of the loader"
    if frames:
        return f"in {frames[0].f_code.co_name}"
    return "ended"


def _faults(workers: Sequence[BaseProcess]) -> list[str]:
    """Return a description of each worker process that is dead or stopped."""
    pids = [worker.pid for worker in workers if worker.pid is not None]
    return [f"worker process {pid} {fault}" for pid in pids if (fault := process_fault(pid)) is not None]


def _end_all(workers: Sequence[BaseProcess]) -> None:
    """Make the worker processes dump their stacks to stderr, then kill them."""
    for worker in workers:
        if worker.pid is not None:
            with suppress(OSError):
                os.kill(worker.pid, STACKS)
    time.sleep(WORKERS_S if workers else 0)
    for worker in workers:
        worker.kill()
