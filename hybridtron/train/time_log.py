"""Time log: how much of a run's time each section takes, over all its starts, in logs/time.jsonl.

    start         launch, model, restored checkpoint, first batch of a phase
    steps         training steps that count
    data          waits of steps for batches
    refused       steps whose updates were discarded, because their losses or gradients were abnormal
    repeated      steps that were trained again, after an interruption or a rollback
    evaluation    evaluations during training
    checkpoints   waits for checkpoints; with `checkpoint.asynchronous` most of the writing takes no time of the run
    rollbacks     restored checkpoints within a start
    hooks         work at the ends of phases and of the run, such as exports
    between       from the end of a start to the next start: restarts, queues, and pauses that the user made

A start is one launch of the run. The file has a line for each start. The first process updates the line when a step or
a section ends, if the last update is more than FLUSH_S seconds old. If a start is killed, the time since that update
counts as time between starts. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hybridtron.planning.checkpoint_interval import best_interval, lost_fraction, seconds_between_failures
from hybridtron.train.jsonl import read_lines, write_whole
from hybridtron.train.metrics import StepMetrics
from hybridtron.train.outcome import clock

LOG = logging.getLogger(__name__)
FILE = "time.jsonl"
FLUSH_S = 10.0


@dataclass
class StartRecord:
    """A line of logs/time.jsonl: the time of one start.

    began, ended: times in seconds since 1970; `ended` is the time of the last record
    processes: number of processes, which have a device each
    resumed: step from which the start resumed; 0 without a checkpoint
    step: last step
    trained: number of steps that the start trained
    rolled_back: number of steps that rollbacks of the start discarded
    saves: number of checkpoints
    save_seconds: seconds for which these checkpoints stopped training, without the wait for the last one at the end
    seconds: section -> seconds; the sections `repeated` and `between` follow from all lines
    """

    began: float
    ended: float
    processes: int
    resumed: int
    step: int
    trained: int = 0
    rolled_back: int = 0
    saves: int = 0
    save_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class TimeLog:
    """Adds up the seconds of each section of one start.

    folder: folder of time.jsonl; None on processes that do not write it
    processes: number of processes, each with a device
    resumed: step of the checkpoint from which this start will resume; 0 without a checkpoint
    age_s: seconds that this start has taken already
    continued: False if earlier starts in the folder belong to another run
    """

    def __init__(
        self, folder: Path | None, processes: int, resumed: int, *, age_s: float = 0.0, continued: bool = True
    ) -> None:
        self.path = None if folder is None else folder / FILE
        self.earlier: list[dict[str, Any]] = []
        if self.path is not None and continued:
            self.earlier = read_lines(self.path)
        now = time.time()
        self.record = StartRecord(now - age_s, now, processes, resumed, resumed)
        self.record.seconds["start"] = age_s
        self.section = "start"
        self.since = time.monotonic()
        self.flushed = self.since
        self._flush()

    @contextmanager
    def spent_on(self, section: str) -> Generator[None]:
        """Add the time of the block to a section. In nested blocks, time is added to the innermost block's section."""
        outer = self.section
        self._enter(section)
        try:
            yield
        finally:
            self._enter(outer)

    def count_step(self, metrics: StepMetrics, accepted: bool) -> None:
        """Count a trained step. Its time is a part of the block that `spent_on("steps")` measures."""
        self.record.step = metrics.step
        self.record.trained += 1
        self._move(metrics.data_wait, "data")
        if not accepted:
            self._move(metrics.step_time - metrics.data_wait, "refused")
        self._enter(self.section)

    def count_rollback(self, failed_step: int, to_step: int) -> None:
        """Count the steps that a rollback discards."""
        self.record.rolled_back += failed_step - to_step
        self.record.step = to_step

    def resume(self, step: int) -> None:
        """Set the step of the restored checkpoint: an older one than planned, if the planned checkpoint was broken."""
        self.record.resumed = step
        self.record.step = step

    def count_save(self, seconds: float) -> None:
        """Count a checkpoint that has stopped training for a number of seconds."""
        self.record.saves += 1
        self.record.save_seconds += seconds

    def spent(self) -> TimeSpent:
        """Return the time of this start and of all earlier starts."""
        self._enter(self.section)
        return add_up([*records_of(self.earlier), self.record])

    def close(self) -> None:
        """Write the last record."""
        self._enter(self.section)
        self._flush()

    def _enter(self, section: str) -> None:
        now = time.monotonic()
        self._add(self.section, now - self.since)
        self.section = section
        self.since = now
        if now - self.flushed > FLUSH_S:
            self._flush()

    def _move(self, seconds: float, section: str) -> None:
        self._add("steps", -seconds)
        self._add(section, seconds)

    def _add(self, section: str, seconds: float) -> None:
        self.record.seconds[section] = self.record.seconds.get(section, 0.0) + seconds

    def _flush(self) -> None:
        self.flushed = time.monotonic()
        self.record.ended = self.record.began + sum(self.record.seconds.values())
        if self.path is None:
            return
        lines = [*self.earlier, asdict(self.record)]
        try:
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:  # training must not end for want of its time log
            LOG.warning("%s can't be written: %s", self.path, error)


@dataclass(frozen=True)
class TimeSpent:
    """A run's time by section, over all its starts.

    starts: number of starts
    save_s: mean seconds for which a checkpoint stops training; None before the first checkpoint
    processes: number of processes in the last start
    seconds: section -> seconds, in falling order; sections without time are left out
    """

    starts: int
    save_s: float | None
    processes: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def start_s(self) -> float:
        """Mean seconds from a launch to its first step."""
        return self.seconds.get("start", 0.0) / self.starts

    def interval(self, devices: int | None = None) -> str | None:
        """Return a sentence with the interval between checkpoints that loses the least time; None before the first one.

        devices: number of devices, on which the rate of failures depends; None for those of the last start
        """
        if not self.save_s:
            return None
        count = devices or self.processes
        failure_s = seconds_between_failures(count)
        interval_s = best_interval(self.save_s, failure_s)
        lost = lost_fraction(interval_s, self.save_s, self.start_s, failure_s)
        if count == 1:
            on_devices = "1 device"
        else:
            on_devices = f"{count} devices"
        return (
            f"a checkpoint stops training for {self.save_s:.1f} s, a start takes {self.start_s:.0f} s; at Llama 3's "
            f"rate of failures, one in {failure_s / 3600:,.0f} h on {on_devices}, a checkpoint every "
            f"{clock(interval_s)} is best and {lost:.2%} of the time is lost"
        )

    def words(self) -> str:
        """Return a text such as `96.0% steps, 3.1% start, 0.9% checkpoints`."""
        shares = ((section, seconds / max(self.total, 1e-9)) for section, seconds in self.seconds.items())
        return ", ".join(f"{share:.1%} {section}" for section, share in shares if share >= 0.0005)


def read_time(run_dir: Path) -> TimeSpent | None:
    """Read a run's time log; None if the run has none."""
    records = records_of(read_lines(run_dir / "logs" / FILE))
    if not records:
        return None
    return add_up(records)


def records_of(lines: Sequence[Mapping[str, Any]]) -> list[StartRecord]:
    """Return the records of lines that have the fields of this version."""
    names = {each.name for each in fields(StartRecord)}
    return [StartRecord(**line) for line in lines if line.keys() == names]


def add_up(records: Sequence[StartRecord]) -> TimeSpent:
    """Add up the starts of a run, in the order in which they began.

    Steps count as repeated if a rollback discarded them, or if they come after the checkpoint from which the next start
    resumed. Each is assumed to take the mean time of its start's steps.
    """
    seconds: dict[str, float] = {}
    for number, record in enumerate(records):
        sections = dict(record.seconds)
        repeated = record.rolled_back
        if number + 1 < len(records):
            later = records[number + 1]
            repeated += max(0, record.step - later.resumed)
            sections["between"] = max(0.0, later.began - record.ended)
        share = min(1.0, repeated / max(record.trained, 1))
        sections["repeated"] = share * sections.get("steps", 0.0)
        sections["steps"] = (1.0 - share) * sections.get("steps", 0.0)
        for section, spent in sections.items():
            seconds[section] = seconds.get(section, 0.0) + spent
    ordered = sorted(((section, spent) for section, spent in seconds.items() if spent > 0), key=lambda item: -item[1])
    saves = sum(record.saves for record in records)
    if saves == 0:
        save_s = None
    else:
        save_s = sum(record.save_seconds for record in records) / saves
    return TimeSpent(len(records), save_s, records[-1].processes, dict(ordered))
