"""Progress on the console: a live bar on a terminal, plain lines elsewhere. Both show an estimate of the time left."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hybridtron.train.metrics import StepMetrics
from hybridtron.train.outcome import clock


class ConsoleSink:
    """Sink that shows a live bar on a terminal, or else prints a line every `log_every` steps and at evaluations.

    The time left is the number of remaining steps, times the mean time of a step since this start. That mean includes
    evaluations and saves.
    """

    def __init__(self, log_every: int, first_step: int, last_step: int) -> None:
        self.console = Console()
        self.first_step, self.began = first_step, time.monotonic()
        self.log_every = log_every
        self.last_step = last_step
        self.bar: Progress | None = None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=last_step, completed=first_step)
            self.bar.start()

    def write(self, metrics: StepMetrics) -> None:
        added = "".join(f"  {name} {loss:.4f}" for name, loss in (metrics.auxiliary or {}).items())
        summary = (
            f"loss {metrics.loss:.4f}{added}  lr {metrics.lr:.2e}  grad norm {metrics.grad_norm:.3f}  "
            f"{metrics.tokens_per_second:,.0f} tokens/s"
        )
        if self.bar is not None:
            self.bar.update(self.task, completed=metrics.step, description=summary)
        elif metrics.step % self.log_every == 0 or metrics.step == self.last_step:
            print(f"step {metrics.step}/{self.last_step}  {summary}  {self._left(metrics.step)}", flush=True)
        if metrics.validation:
            losses = "  ".join(f"{length} {loss:.4f}" for length, loss in metrics.validation.items())
            text = f"step {metrics.step}  validation loss at multiples of the training length: {losses}"
            self.console.print(text, highlight=False, soft_wrap=True)  # above the bar where there is one
        if metrics.evaluation:
            values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.evaluation.items())
            self.console.print(f"step {metrics.step}  {values}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()

    def _left(self, step: int) -> str:
        pace = (time.monotonic() - self.began) / (step - self.first_step)
        return f"{clock(pace * (self.last_step - step))} left"
