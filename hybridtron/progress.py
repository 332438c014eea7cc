"""Progress of long work on stderr: a bar in a terminal, and lines in a file or a job's log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

REPORT_INTERVAL_S = 30.0  # seconds between lines of progress if stderr is not a terminal

ReportProgress = Callable[[int, int], None]
"""A function that work calls with two numbers: of finished parts or bytes, and of all."""


@contextmanager
def progress_bar(what: str) -> Iterator[ReportProgress]:
    """Show progress and the remaining time on stderr while the block runs.

    A terminal shows a bar. Any other stderr gets a line at most every REPORT_INTERVAL_S seconds. The block reports
    progress by calls of the yielded function, whose arguments are (number of finished parts, number of all parts).
    """
    with _shown(what, [MofNCompleteColumn()], lambda done, total, _: f"{done} of {total}") as report:
        yield report


@contextmanager
def byte_progress_bar(what: str) -> Iterator[ReportProgress]:
    """Show progress as `progress_bar` does, for work that is counted in bytes, with the mean rate."""
    with _shown(what, [DownloadColumn(), TransferSpeedColumn()], _gigabytes) as report:
        yield report


def _gigabytes(done: int, total: int, seconds: float) -> str:
    """Return the text of an amount of bytes and its rate: `1.50 of 4.00 GB, 0.100 GB/s`."""
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB, {done / 1e9 / seconds:.3f} GB/s"


@contextmanager
def _shown(
    what: str, columns: list[ProgressColumn], amount: Callable[[int, int, float], str]
) -> Iterator[ReportProgress]:
    """Show progress as a bar with these columns, or as lines with the text `amount(done, total, seconds)`."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield _in_lines(what, console, amount)
        return
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    with progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _in_lines(what: str, console: Console, amount: Callable[[int, int, float], str]) -> ReportProgress:
    """Return a function that prints progress as plain lines, at most one line in REPORT_INTERVAL_S seconds."""
    started = reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported > REPORT_INTERVAL_S and done:
            reported = now
            seconds = now - started
            time_left = timedelta(seconds=round(seconds * (total - done) / done))
            console.print(f"{what}: {amount(done, total, seconds)}, {time_left} left")

    return report
