"""Shows the progress of `hybridtron data prepare` on stderr, as a bar in a terminal and otherwise as text lines."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import timedelta

from rich import progress as bars
from rich.console import Console

from hybridtron.data.prepare.parts import PrepareJob, read_record

REPORT_INTERVAL_S = 30.0  # seconds between two lines if stderr is not a terminal


class PrepareProgress:
    """Display of a preparation's progress.

    Counts of bytes and inputs include the work that an interrupted preparation has finished. Token counts do not.
    """

    def __init__(self, job: PrepareJob, finished: Collection[int]) -> None:
        self.job = job
        self.tokens = 0
        finished_inputs = [data_input for number in finished for data_input in job.parts[number]]
        self.inputs = len(finished_inputs)
        self.remarks: set[str] = set()
        self.started = self.reported = time.monotonic()
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
            speed_estimate_period=20 * REPORT_INTERVAL_S,
        )
        size = sum(data_input.size for data_input in job.inputs)
        self._task = self.bar.add_task(
            "preparing", total=size, completed=sum(data_input.size for data_input in finished_inputs), rate=""
        )
        if finished_inputs:
            self.console.print(f"resuming: {self.inputs} of {len(job.inputs)} inputs are finished")

    def advance(self, size: int, tokens: int) -> None:
        """Count `size` more bytes read, and `tokens` more tokens written."""
        self.tokens += tokens
        now = time.monotonic()
        task = self.bar.tasks[self._task]
        rate = f"{self.tokens:,} tokens, {self.tokens / max(now - self.started, 1e-9):,.0f} tokens/s"
        self.bar.update(self._task, advance=size, rate=rate)
        if not self.console.is_terminal and now - self.reported > REPORT_INTERVAL_S:
            self.reported = now
            inputs = f"{self.inputs} of {len(self.job.inputs)} inputs"
            if task.time_remaining is None:
                left = ""
            else:
                left = f", {timedelta(seconds=task.time_remaining)} left"
            self.console.print(f"{task.percentage:.1f}% of {(task.total or 0) / 1e9:.2f} GB, {inputs}, {rate}{left}")

    def finish(self, number: int) -> None:
        """Count a finished part, and print messages about bad entries and other remarks on its inputs."""
        self.inputs += len(self.job.parts[number])
        finished = read_record(self.job, number)
        assert finished is not None
        for tally in finished.tallies:
            if tally.bad:
                self.console.print(tally.bad_entries())
            for remark in tally.remarks:
                if remark not in self.remarks:
                    self.console.print(f"note: {remark}")
                    self.remarks.add(remark)
