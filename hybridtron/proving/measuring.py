"""What every benchmark shares: rounds in which all forms take turns, and the report made of them.

A report has tables of ratios, goals with what was reached, and lines that only the console shows: absolute times,
which mean nothing on another machine and are therefore never written down for a CPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import compute_device, describe_device, synchronize

VERSIONS = ("torch", "transformers", "numpy")
DOCUMENTS = 3  # per row of random tokens, where the recipe keeps documents apart
SLOW = 2.0  # seconds from which on a form is not warmed up before it is measured


@dataclass(frozen=True)
class BenchSettings:
    """What the command line chose. `recipe` holds the key=value arguments."""

    quick: bool
    repetitions: int
    threads: int
    recipe: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timing:
    """The rounds of one form, in seconds."""

    seconds: tuple[float, ...]

    @property
    def fastest(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """How much longer the median round took than the fastest, as a share."""
        return sorted(self.seconds)[len(self.seconds) // 2] / self.fastest - 1

    def __str__(self) -> str:
        return f"{self.fastest * 1e3:.1f} ms (median +{self.spread:.0%}, {len(self.seconds)} rounds)"


@dataclass(frozen=True)
class Contender:
    """One way to do the work, and how many rounds it is worth; fewer for a peer that takes minutes."""

    run: Callable[[], object]
    rounds: int


def interleaved(forms: Mapping[str, Contender]) -> dict[str, Timing]:
    """Time all forms in turns, round by round; every form runs once before, unless that took long.

    A form that returns a number of seconds has timed itself: what it did before it began to count is left out.
    """
    times: dict[str, list[float]] = {name: [] for name in forms}
    for name, form in forms.items():
        first = _seconds(form.run)
        if first > SLOW:
            times[name].append(first)
    for round_ in range(max(form.rounds for form in forms.values())):
        for name, form in forms.items():
            if round_ < form.rounds and len(times[name]) < form.rounds:
                times[name].append(_seconds(form.run))
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def _seconds(run: Callable[[], object]) -> float:
    clock = time.process_time if processor_time() else time.perf_counter
    synchronize()
    start = clock()
    own = run()
    synchronize()
    return own if isinstance(own, float) else clock() - start


def processor_time() -> bool:
    """Whether processor time is counted: with one thread it is what a CPU needs, however busy with other things."""
    return compute_device().type == "cpu" and torch.get_num_threads() == 1


@dataclass(frozen=True)
class Goal:
    """A number that we want, and what it turned out to be."""

    text: str
    wanted: str
    value: float
    reached: bool

    @staticmethod
    def at_least(text: str, limit: float, value: float) -> Goal:
        return Goal(text, f">= {limit:g}", value, value >= limit)

    @staticmethod
    def at_most(text: str, limit: float, value: float) -> Goal:
        return Goal(text, f"<= {limit:g}", value, value <= limit)


@dataclass(frozen=True)
class BenchTable:
    """A table of the report; cells are text."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class BenchReport:
    """One benchmark's outcome."""

    title: str
    device: str
    tables: list[BenchTable]
    goals: list[Goal]
    notes: list[str]
    console: list[str] = field(default_factory=list)


def times(ratio: float) -> str:
    """A ratio for a table: `3.4x`, `120x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 10 else f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def print_report(report: BenchReport) -> None:
    """Tables, goals, and the absolute times."""
    console = Console()
    for rows in report.tables:
        table = Table(*rows.header, title=f"{report.title}: {rows.title}", title_justify="left")
        for cells in rows.cells:
            table.add_row(*map(escape, cells))
        console.print(table)
    for goal in report.goals:
        mark = "[green]reached[/]" if goal.reached else "[red]missed[/]"
        console.print(f"{mark}  {escape(goal.text)}: {goal.value:.3g} (wanted {goal.wanted})", highlight=False)
    for line in (*report.notes, *report.console):
        console.print(escape(line), highlight=False)


def markdown(report: BenchReport, settings: BenchSettings, command: str) -> str:
    """The report as a page of its own, with what it takes to measure it again."""
    lines = [f"# {report.title}", "", f"`{command}`", "", f"- machine: {machine(settings, report.device)}"]
    lines += [f"- versions: {versions()}"]
    lines += [f"- {note}" for note in report.notes]
    for rows in report.tables:
        lines += ["", f"## {rows.title}", "", *grid(rows.header, rows.cells)]
    if report.goals:
        cells = [(g.text, g.wanted, f"{g.value:.3g}", "yes" if g.reached else "**no**") for g in report.goals]
        lines += ["", "## Goals", "", *grid(("goal", "wanted", "measured", "reached"), cells)]
    return "\n".join(lines) + "\n"


def grid(header: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *cells)]


def machine(settings: BenchSettings, device: str) -> str:
    """The processor, how much of it was used, and how busy it was with other things."""
    if device != "cpu":
        return describe_device()
    load = f", load average {os.getloadavg()[0]:.1f} when measured" if hasattr(os, "getloadavg") else ""
    threads = "1 thread, processor time" if processor_time() else f"{settings.threads} threads, wall-clock time"
    return f"{processor()}, {os.cpu_count()} cores, {threads}{load}"


def processor() -> str:
    """The processor's name by the kernel, or what Python knows where there is no /proc."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> str:
    """Python's version and those of what is compared."""
    found = [f"Python {platform.python_version()}"]
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def random_batches(config: Config) -> list[Batch]:
    """The micro-batches of one step of the first phase, of random tokens that all count."""
    phase, generator = config.phases[0], torch.Generator().manual_seed(0)
    rows, length = phase.micro_batch, phase.seq_len
    batches = []
    for _ in range(phase.global_batch // rows):
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
        mask = torch.ones(rows, length, dtype=torch.bool)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], mask, _seq_info(config, rows, length)))
    return batches


def _seq_info(config: Config, rows: int, length: int) -> SeqInfo:
    if resolve(config)[0].documents is Documents.join:
        return SeqInfo.stream(rows, length)
    places = torch.arange(length)
    size = -(-length // DOCUMENTS)
    return SeqInfo((places % size).expand(rows, length), (places // size).to(torch.int32).expand(rows, length))
