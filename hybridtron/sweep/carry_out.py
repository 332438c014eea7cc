"""Execution of a sweep on this machine: several runs at a time, each as `hybridtron train` in its own process.

If a sweep is started again, finished runs are skipped, and interrupted or failed runs resume from their newest
checkpoint. If a run fails, the failure is reported and the other runs continue, except runs that start from the weights
of the failed run. A run's output is appended to logs/NAME.log in the sweep's folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybridtron.config.weights import BEST
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import Sweep, SweepRun
from hybridtron.train import outcome
from hybridtron.train.jsonl import read_lines, read_record, write_whole

STARTED = "sweep.json"  # file in the sweep's folder: run's name -> the run's settings
LOGS = "logs"
TRAIN = (sys.executable, "-m", "hybridtron", "train")
POLL_INTERVAL_S = 0.2  # seconds between checks for processes that have ended
TAIL = 2**16  # bytes read from the end of metrics.jsonl to find the last step


@dataclass(frozen=True)
class EndedRun:
    """A run that ended after `seconds`, or could not be started.

    `fault` is the reason for a failure; it is empty for a finished run.
    """

    run: SweepRun
    seconds: float
    fault: str = ""


@dataclass
class Folder:
    """A sweep's folder, with a folder inside it for each run."""

    path: Path

    def of(self, name: str) -> Path:
        """Return a run's folder."""
        return self.path / name

    def settings(self, run: SweepRun) -> list[str]:
        """Return a run's arguments for `hybridtron train`."""
        if run.start is None:
            start = []
        else:
            start = [f"run.weights={self.of(run.start)}{BEST if run.best else ''}"]
        return [*start, *run.settings, f"run.dir={self.of(run.name)}", f"run.name={run.name}"]

    def is_finished(self, name: str) -> bool:
        """Return True if the run recorded that it finished."""
        return read_record(self.of(name) / outcome.FILE).get("outcome") == "finished"

    def step(self, name: str) -> int:
        """Return the last step in a run's metrics.jsonl; 0 if the file has no line yet."""
        lines = read_lines(self.of(name) / "metrics.jsonl", TAIL)
        return lines[-1]["step"] if lines else 0

    def record(self, sweep: Sweep) -> None:
        """Write the settings of all the sweep's runs to STARTED.

        Raises Unusable if a run's folder exists and STARTED has other settings for this run.
        """
        recorded_settings = read_record(self.path / STARTED)
        for run in sweep.runs:
            settings = self.settings(run)
            earlier_settings = recorded_settings.get(run.name, [])
            if earlier_settings and earlier_settings != settings and self.of(run.name).exists():
                changed = ", ".join(sorted(set(earlier_settings) ^ set(settings))) or "the same in another order"
                raise Unusable(
                    f"{self.of(run.name)} was started with other settings ({changed}): "
                    "name another folder with --output, or remove the run's folder",
                    code="changed",
                )
            recorded_settings[run.name] = settings
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / LOGS).mkdir(exist_ok=True)
        write_whole(self.path / STARTED, json.dumps(recorded_settings, indent=1))


def carry_out(sweep: Sweep, folder: Folder, jobs: int, watch: Callable[[Collection[str]], None]) -> Iterator[EndedRun]:
    """Run all runs that have not finished, `jobs` at a time; yield each run when it ends.

    `watch` is called every POLL_INTERVAL_S with the names of the runs whose processes run. If this process gets SIGINT
    or SIGTERM, it sends SIGTERM to the processes of these runs. They then write a checkpoint and end.
    """
    waiting = [run for run in sweep.runs if not folder.is_finished(run.name)]
    failed: set[str] = set()
    running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], float]] = {}
    with _ended_with(running):
        while waiting or running:
            for run in _ready(waiting, {*running, *(entry.name for entry in waiting)}, jobs - len(running)):
                waiting.remove(run)
                if run.start in failed:
                    failed.add(run.name)
                    yield EndedRun(run, 0.0, f"needs the weights of {run.start}, which failed")
                else:
                    running[run.name] = run, _start(run, folder), time.monotonic()
            ended = [entry for entry in running.values() if entry[1].poll() is not None]
            watch(running)
            for run, process, began in ended:
                del running[run.name]
                if process.returncode == 0:
                    fault = ""
                else:
                    fault = _fault(run, folder, process.returncode)
                failed |= {run.name} if fault else set()
                yield EndedRun(run, time.monotonic() - began, fault)
            time.sleep(POLL_INTERVAL_S)


def _ready(waiting: Sequence[SweepRun], unfinished: set[str], free: int) -> list[SweepRun]:
    """Return up to `free` waiting runs. A run that starts from another run's weights waits until that run has ended."""
    return [run for run in waiting if run.start not in unfinished][: max(free, 0)]


def _start(run: SweepRun, folder: Folder) -> subprocess.Popen[bytes]:
    """Start a run's process, and append the process's output to the run's log."""
    command = [*TRAIN, *folder.settings(run)]
    log: IO[bytes] = (folder.path / LOGS / f"{run.name}.log").open("ab")
    with log:
        return subprocess.Popen(  # in its own session, so that Ctrl-C in the terminal reaches only the sweep's process
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _fault(run: SweepRun, folder: Folder, code: int) -> str:
    """Return exit code, reason and log file of a failed run; the log's last line is the reason if none was recorded."""
    log = folder.path / LOGS / f"{run.name}.log"
    recorded = read_record(folder.of(run.name) / outcome.FILE).get("reason")
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}: {recorded or last} ({log})"


@contextmanager
def _ended_with(running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Send SIGTERM to all running processes when the block ends, and wait until they have ended.

    Inside the block a SIGTERM to this process raises KeyboardInterrupt, so that the block ends. A training process
    writes a checkpoint before it ends.
    """

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    handler_before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before)
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


def share_cores(jobs: int) -> None:
    """Set OMP_NUM_THREADS to the number of cores divided by `jobs`, unless OMP_NUM_THREADS is already set."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
