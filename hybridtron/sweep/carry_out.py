"""Carries out the runs of a sweep, several at a time, each `hybridtron train` in a process of its own.

What has finished is not started again; what was interrupted or failed resumes from its newest checkpoint. A run that
fails is reported and the others continue. All output of a run goes to LOGS/NAME.log in the sweep's folder.
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
from hybridtron.train.records import read_lines, read_record, write_whole

STARTED = "sweep.json"  # in the sweep's folder: the settings of every run that was started, by its name
LOGS = "logs"
TRAIN = (sys.executable, "-m", "hybridtron", "train")
LOOK_S = 0.2
TAIL = 2**16  # bytes of metrics.jsonl, in which the last step is looked for


@dataclass(frozen=True)
class EndedRun:
    """A run that ended, and why where it did not finish."""

    run: SweepRun
    seconds: float
    fault: str = ""


@dataclass
class Folder:
    """The folder of a sweep."""

    path: Path

    def of(self, name: str) -> Path:
        return self.path / name

    def settings(self, run: SweepRun) -> list[str]:
        """What `hybridtron train` gets."""
        start = [] if run.start is None else [f"run.weights={self.of(run.start)}{BEST if run.best else ''}"]
        return [*start, *run.settings, f"run.dir={self.of(run.name)}", f"run.name={run.name}"]

    def is_finished(self, name: str) -> bool:
        return read_record(self.of(name) / outcome.FILE).get("outcome") == "finished"

    def step(self, name: str) -> int:
        lines = read_lines(self.of(name) / "metrics.jsonl", TAIL)
        return lines[-1]["step"] if lines else 0

    def record(self, sweep: Sweep) -> None:
        """Keep what is started. Unusable where a run was started before with other settings."""
        known = read_record(self.path / STARTED)
        for run in sweep.runs:
            settings, before = self.settings(run), known.get(run.name, [])
            if before and before != settings and self.of(run.name).exists():
                changed = sorted(set(before) ^ set(settings))
                raise Unusable(
                    f"{self.of(run.name)} was started with other settings ({', '.join(changed)}): "
                    "name another folder with --output, or remove this run's"
                )
            known[run.name] = settings
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / LOGS).mkdir(exist_ok=True)
        write_whole(self.path / STARTED, json.dumps(known, indent=1))


def carry_out(sweep: Sweep, folder: Folder, jobs: int, watch: Callable[[Collection[str]], None]) -> Iterator[EndedRun]:
    """Every run that has not finished, `jobs` at a time, as it ends; meanwhile `watch` gets those that run.

    Where this process is interrupted or asked to end, the runs are asked to save and end.
    """
    waiting = [run for run in sweep.runs if not folder.is_finished(run.name)]
    failed: set[str] = set()
    running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], float]] = {}
    with _ended_with(running):
        while waiting or running:
            for run in _ready(waiting, {*running, *(one.name for one in waiting)}, jobs - len(running)):
                waiting.remove(run)
                if run.start in failed:
                    failed.add(run.name)
                    yield EndedRun(run, 0.0, f"{run.start} failed, whose weights it starts from")
                else:
                    running[run.name] = run, _started(run, folder), time.monotonic()
            ended = [one for one in running.values() if one[1].poll() is not None]
            watch(running)
            for run, process, began in ended:
                del running[run.name]
                fault = "" if process.returncode == 0 else _fault(run, folder, process.returncode)
                failed |= {run.name} if fault else set()
                yield EndedRun(run, time.monotonic() - began, fault)
            time.sleep(LOOK_S)


def _ready(waiting: Sequence[SweepRun], unfinished: set[str], free: int) -> list[SweepRun]:
    """Runs that can start now: what they start from has ended."""
    return [run for run in waiting if run.start not in unfinished][: max(free, 0)]


def _started(run: SweepRun, folder: Folder) -> subprocess.Popen[bytes]:
    command = [*TRAIN, *folder.settings(run)]
    log: IO[bytes] = (folder.path / LOGS / f"{run.name}.log").open("ab")
    with log:
        return subprocess.Popen(  # not of our terminal, whose Ctrl-C reaches this process alone
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _fault(run: SweepRun, folder: Folder, code: int) -> str:
    """Why a run did not finish: what it recorded, or the last line that it wrote."""
    log = folder.path / LOGS / f"{run.name}.log"
    recorded = read_record(folder.of(run.name) / outcome.FILE).get("reason")
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}: {recorded or last} ({log})"


@contextmanager
def _ended_with(running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Processes that still run at the end of the block are asked to save and end, and waited for."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            process.wait()


def share_cores(jobs: int) -> None:
    """Let the runs share this machine's cores, unless OMP_NUM_THREADS says otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))
