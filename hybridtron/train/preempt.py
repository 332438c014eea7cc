"""Stopping on demand: all ranks save a checkpoint after the same step and exit with code 75.

Three events stop a run:

    - A rank gets the signal SIGTERM, SIGINT or SIGUSR1.
    - The deadline is near: the end of the allowed time (`run.max_minutes` or SLURM_JOB_END_TIME).
    - The torchrun that started this process has died.

A signal may arrive during start-up, a step, an evaluation or a checkpoint. The signal handler only sets a flag. In
every step the reduction of the gradient norm also adds up the ranks' flags, so that all ranks stop after the same step.
A signal that arrives after this reduction stops the run after the next step. Later signals change nothing. When
torchrun dies, the ranks have `launcher.GRACE_S` seconds to save. A process that has not yet done a step has nothing to
save. It ends immediately, since another start of the run may already wait for the run's folder.

A run stops before the deadline, early enough to save a checkpoint. It reserves the time that its slowest checkpoint so
far took, plus three times the longest time between two successive steps. Under SLURM, which kills a job at the
deadline, the reserve is at least a minute. A large model's first checkpoint may take longer than a minute. For such a
model let SLURM send a signal earlier, with `#SBATCH --signal=B:USR1@600`.

Launchers treat signals in different ways:

    torchrun    It forwards SIGTERM and SIGINT to the ranks, and kills ranks that have not ended 30 s later
                (`--shutdown-timeout`). SIGUSR1 kills torchrun itself, unless torchrun was started with
                `--signals-to-handle SIGTERM,SIGINT,SIGUSR1`. Exit code 75 counts as a failure: with `--max-restarts`
                torchrun would start the run again.
    srun        It forwards SIGUSR1 to the ranks. But when it gets SIGTERM, it kills the ranks (SLURM 22.05). So SLURM
                must send signals to the job script only. For every signal that the script gets, it sends SIGUSR1 to
                the ranks (`cluster/forwarding.sh`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from hybridtron.config.schema import RunConfig
from hybridtron.train.launcher import Launcher

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REASONS = (*(number.name for number in SIGNALS), "the time is up", "its launcher is gone")
# A step whose flags are sent just before the deadline's reserve begins, the next step, and a margin of one step.
STEPS_RESERVED = 3
SLURM_RESERVE_S = 60.0  # minimum reserve before the deadline in a SLURM job


class StopRequests:
    """Context manager that collects requests to stop. Enter it before the slow imports, so that no signal is lost."""

    def __init__(self, run: RunConfig, is_main: bool, environment: Mapping[str, str] = os.environ) -> None:
        self.is_main = is_main
        self.received = 0  # number of the first signal that this process has received; 0 if there is none
        self.deadline = _deadline(run.max_minutes, environment)
        if "SLURM_JOB_END_TIME" in environment:
            self.least_reserve = SLURM_RESERVE_S
        else:
            self.least_reserve = 0.0
        self.launcher = Launcher(environment)
        self.longest_save = self.longest_step = 0.0  # durations in seconds
        self.last_border: float | None = None  # the time at which the last step ended, on the monotonic clock

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
            response = "the run is already stopping"
        else:
            response = "the run saves and stops after this step, or after the next one"
        self.received = self.received or number
        if self.is_main:  # not `print`: it raises an error if the signal has interrupted another `print`
            os.write(2, f"{name}: {response}\n".encode())

    def flags(self) -> list[float]:
        """Return 1 for each reason for which this rank wants to stop, and 0 for others; called once in each step."""
        now = time.monotonic()
        if self.last_border is not None:
            self.longest_step = max(self.longest_step, now - self.last_border)
        self.last_border = now
        self.launcher.worth_saving = True
        reasons = [*(self.received == number for number in SIGNALS), now > self.deadline - self.reserve]
        return [float(wanted) for wanted in (*reasons, self.launcher.is_gone)]

    @staticmethod
    def agreed(sums: Sequence[float]) -> str | None:
        """Return the reason why all ranks must stop after this step, or None if they continue.

        sums: the ranks' flags, each summed over all ranks
        """
        return next((reason for reason, ranks in zip(REASONS, sums, strict=True) if ranks), None)

    @staticmethod
    def ignore() -> None:
        """Ignore signals from now on, so that a late signal can't change the exit code of a finished process."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @property
    def reserve(self) -> float:
        """Seconds before the deadline that are reserved for the last steps and their checkpoint."""
        return max(self.least_reserve, self.longest_save + STEPS_RESERVED * self.longest_step)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the duration of the block, which writes a checkpoint, and exclude it from the step's duration."""
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        self.longest_save = max(self.longest_save, took)
        if self.last_border is not None:
            self.last_border += took


def _deadline(max_minutes: float | None, environment: Mapping[str, str]) -> float:
    """Return the deadline in seconds on the monotonic clock; infinity if the time is not limited."""
    limits = [float("inf")]
    if max_minutes is not None:
        limits.append(60 * max_minutes)
    if ends := environment.get("SLURM_JOB_END_TIME"):
        limits.append(float(ends) - time.time())
    return time.monotonic() + min(limits)
