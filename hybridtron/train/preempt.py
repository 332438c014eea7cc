"""Stopping on demand: all ranks save a checkpoint after the same step and exit with code 75.

Asked for by SIGTERM, SIGINT or SIGUSR1 on any rank, by the end of the time that the run may take (`run.max_minutes`, or
SLURM_JOB_END_TIME), or by the death of the torchrun that started this process. A signal only sets a flag, whenever it
comes: during start-up, a step, an evaluation or a checkpoint. The ranks ask each other after every step, so that a
signal at one of them stops all. Further signals change nothing. The death of torchrun leaves `launcher.GRACE_S` for all
this, and a process that has made no step ends at once: the next start may wait for the folder already.

Time is kept back for the end: the longest checkpoint so far, and twice the longest time from one step's end to the
next; under SLURM, which kills what is late, at least a minute. A large model that is stopped before its first periodic
checkpoint may need more: then ask early, by `#SBATCH --signal=B:USR1@600`.

A signal has to reach a rank. torchrun hands SIGTERM and SIGINT on, and kills what has not ended 30 s later
(`--shutdown-timeout`); SIGUSR1 kills torchrun itself, unless it runs with `--signals-to-handle SIGTERM,SIGINT,SIGUSR1`.
For torchrun code 75 is a failure like any other: `--max-restarts` would start the run again.
srun hands SIGUSR1 on to every rank; at SIGTERM it kills them (SLURM 22.05). So the job script of `slurm/job.py`, which
alone is signalled, hands every signal on as SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from hybridtron.config.schema import RunConfig
from hybridtron.train.launcher import Launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SLURM_RESERVE_S = 60.0


class StopRequests:
    """Listens for reasons to stop from its start as a context on; installed before the slow imports."""

    def __init__(self, run: RunConfig, is_main: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.is_main = is_main
        self.received = 0
        self.deadline = _deadline(run.max_minutes, environment)
        self.least_reserve = SLURM_RESERVE_S if "SLURM_JOB_END_TIME" in environment else 0.0
        self.launcher = Launcher(environment)
        self.longest_save = self.longest_step = 0.0
        self.last_border: float | None = None

    def __enter__(self) -> Self:
        self.before: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        self.launcher.watch()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        again = "again, the run stops already" if self.received else "the run saves and stops after this step"
        self.received = self.received or number
        if self.is_main:  # not print, which must not be interrupted by itself
            os.write(2, f"{name}: {again}\n".encode())

    def agreed(self, greatest: Callable[[list[float]], list[float]]) -> str | None:
        """Why all ranks stop after this step, or None; asked at the end of each step.

        `greatest` gives the greatest of each number over all ranks.
        """
        now = time.monotonic()
        if self.last_border is not None:
            self.longest_step = max(self.longest_step, now - self.last_border)
        self.last_border = now
        self.launcher.worth_saving = True
        number, late, orphan = greatest([self.received, now > self.deadline - self.reserve, self.launcher.is_gone])
        if number:
            return signal.Signals(int(number)).name
        return "the time is up" if late else "its launcher is gone" if orphan else None

    @staticmethod
    def ignore() -> None:
        """Hear nothing more: for a process that has done what it was asked for, so that its exit code stands."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @property
    def reserve(self) -> float:
        """Seconds before the end at which the run must stop."""
        return max(self.least_reserve, self.longest_save + 2 * self.longest_step)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Learn how long a checkpoint takes; its time is not the next step's."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self.longest_save = max(self.longest_save, took)
        if self.last_border is not None:
            self.last_border += took


def _deadline(max_minutes: float | None, environment: Mapping[str, str]) -> float:
    """When the time is up, on the monotonic clock; never, if nothing sets it."""
    limits = [float("inf")]
    if max_minutes is not None:
        limits.append(60 * max_minutes)
    if ends := environment.get("SLURM_JOB_END_TIME"):
        limits.append(float(ends) - time.time())
    return time.monotonic() + min(limits)
