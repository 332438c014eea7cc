"""Stopping on demand: all ranks save a checkpoint after the same step and exit with code 75.

Three events stop a run: SIGTERM, SIGINT or SIGUSR1 at any rank; the end of the allowed time (`run.max_minutes` or
SLURM_JOB_END_TIME); and the death of the torchrun that started this process. A signal handler only sets a flag, whether
during start-up, a step, an evaluation or a checkpoint. After every step the ranks all-reduce these flags, so that a
signal at one rank stops all. Further signals change nothing. When torchrun has died, `launcher.GRACE_S` remain to save,
and a process that has not done a step ends at once, since another start may already wait for the folder.

A run stops early enough to save: it reserves the time of its longest checkpoint so far, plus twice the longest time
between the ends of two steps. Under SLURM, which kills late processes, the reserve is at least a minute. A large model
that is stopped before its first periodic checkpoint may need more: then ask early, by `#SBATCH --signal=B:USR1@600`.

The signal has to reach a rank. torchrun forwards SIGTERM and SIGINT, and kills processes that have not ended 30 s later
(`--shutdown-timeout`). SIGUSR1 kills torchrun itself, unless it runs with `--signals-to-handle SIGTERM,SIGINT,SIGUSR1`.
Exit code 75 is a failure to torchrun: with `--max-restarts` it would start the run again.
srun forwards SIGUSR1 to every rank, but kills the ranks at SIGTERM (SLURM 22.05). So the job script, which SLURM alone
signals, forwards every signal as SIGUSR1 (`cluster/forwarding.sh`).
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
    """Context manager that collects requests to stop. Enter it before the slow imports, so that no signal is lost."""

    def __init__(self, run: RunConfig, is_main: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.is_main = is_main
        self.received = 0
        self.deadline = _deadline(run.max_minutes, environment)
        if "SLURM_JOB_END_TIME" in environment:
            self.least_reserve = SLURM_RESERVE_S
        else:
            self.least_reserve = 0.0
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
        if self.received:
            again = "again, the run stops already"
        else:
            again = "the run saves and stops after this step"
        self.received = self.received or number
        if self.is_main:  # not print, which must not be interrupted by itself
            os.write(2, f"{name}: {again}\n".encode())

    def agreed(self, greatest: Callable[[list[float]], list[float]]) -> str | None:
        """Return why all ranks stop after this step, or None. All ranks call it at the end of each step.

        `greatest` is an all-reduce: it returns each number's maximum over all ranks.
        """
        now = time.monotonic()
        if self.last_border is not None:
            self.longest_step = max(self.longest_step, now - self.last_border)
        self.last_border = now
        self.launcher.worth_saving = True
        number, late, orphan = greatest([self.received, now > self.deadline - self.reserve, self.launcher.is_gone])
        if number:
            return signal.Signals(int(number)).name
        if late:
            return "the time is up"
        if orphan:
            return "its launcher is gone"
        return None

    @staticmethod
    def ignore() -> None:
        """Ignore signals from now on, so that a late one can't change the exit code of a finished process."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @property
    def reserve(self) -> float:
        """Seconds to keep in reserve before the deadline, for the last step and its checkpoint."""
        return max(self.least_reserve, self.longest_save + 2 * self.longest_step)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Time the block, which writes a checkpoint. Its time does not count as part of the next step."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self.longest_save = max(self.longest_save, took)
        if self.last_border is not None:
            self.last_border += took


def _deadline(max_minutes: float | None, environment: Mapping[str, str]) -> float:
    """Return the deadline in seconds on the monotonic clock, infinity if nothing sets one."""
    limits = [float("inf")]
    if max_minutes is not None:
        limits.append(60 * max_minutes)
    if ends := environment.get("SLURM_JOB_END_TIME"):
        limits.append(float(ends) - time.time())
    return time.monotonic() + min(limits)
