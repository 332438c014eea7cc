"""How far a preparation is: a bar in a terminal, else a line from time to time; all of it on stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich import progress as bars
from rich.console import Console

from hybridtron.data.prepare.parts import Finished, PrepareJob, read_record

EVERY = 30.0  # seconds between lines where there is no terminal


class PrepareProgress:
    """Counts bytes of the inputs and tokens, of this call and of the earlier calls that it resumes."""

    def __init__(self, job: PrepareJob, finished: Mapping[int, Finished]) -> None:
        self.job = job
        self.size = sum(one.size for one in job.inputs)
        self.read = self.read_before = sum(job.inputs[number].size for number in finished)
        self.tokens, self.parts = 0, len(finished)
        self.remarks: set[str] = set()
        self.started = self.reported = time.monotonic()
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TextColumn("{task.fields[rate]}"),
            bars.TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=self.size, completed=self.read, rate="")
        if finished:
            self.say(f"resuming: {len(finished)} of {len(job.inputs)} inputs are finished")

    def __enter__(self) -> PrepareProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, size: int, tokens: int) -> None:
        """`size` more bytes are read, and `tokens` more tokens written."""
        self.read += size
        self.tokens += tokens
        now = time.monotonic()
        rate = self.tokens / max(now - self.started, 1e-9)
        self._bar.update(self._task, completed=self.read, rate=f"{self.tokens:,} tokens, {rate:,.0f}/s")
        if not self.console.is_terminal and now - self.reported > EVERY:
            self.reported = now
            self.say(f"{self._share()}, {self.tokens:,} tokens, {rate:,.0f} tokens/s, {self._left(now)} left")

    def finish(self, number: int) -> None:
        """A part is finished; says what was left out of its input."""
        self.parts += 1
        finished = read_record(self.job, number)
        assert finished is not None
        if finished.tally.bad:
            self.say(finished.tally.bad_entries())
        for remark in finished.tally.remarks:
            if remark not in self.remarks:
                self.say(f"note: {remark}")
                self.remarks.add(remark)

    def say(self, text: str) -> None:
        self.console.print(text)

    def _share(self) -> str:
        inputs = f"{self.parts} of {len(self.job.inputs)} inputs"
        return f"{self.read / max(self.size, 1):.1%} of {self.size / 1e9:.2f} GB, {inputs}"

    def _left(self, now: float) -> str:
        read = self.read - self.read_before
        seconds = (self.size - self.read) * (now - self.started) / read if read > 0 else 0
        return f"{seconds / 3600:.1f} h" if seconds > 3600 else f"{seconds / 60:.0f} min"
