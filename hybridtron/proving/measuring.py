"""Shared parts of all benchmarks: interleaved timing of several forms, and the report that a benchmark fills.

A report has tables of ratios, goals with the measured values, and console lines with absolute times. Absolute times
mean nothing on another machine, so they are never written to a page for a CPU.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from hybridtron.device import compute_device, describe_device, synchronize
from hybridtron.requirements import installed

VERSIONS = ("torch", "transformers", "numpy")
SLOW = 2.0  # seconds; a warm-up that takes longer counts as the first round
TOLERANCE = 1e-5  # maximum difference of forms, relative to each tensor's largest entry
MIB = 2**20
Place = TypeVar("Place")


@dataclass(frozen=True)
class Timing:
    """Rounds of one form, in seconds."""

    seconds: tuple[float, ...]

    @property
    def fastest(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Excess of the median round over the fastest, as a fraction."""
        return sorted(self.seconds)[len(self.seconds) // 2] / self.fastest - 1

    def __str__(self) -> str:
        return f"{self.fastest * 1e3:.1f} ms (median +{self.spread:.0%}, {len(self.seconds)} rounds)"


class Timings(dict[str, Timing]):
    """Rounds of several forms, by name."""

    def ratio(self, form: str, other: str) -> float:
        """Return how many times as long `form` took as `other`."""
        return self[form].fastest / self[other].fastest

    @property
    def spreads(self) -> str:
        return " / ".join(f"+{timing.spread:.0%}" for timing in self.values())


class Seconds(float):
    """Return type of a form that times itself; any other number is a result, such as a loss."""


def interleaved(forms: Mapping[Place, Callable[[], object]], rounds: int) -> dict[Place, Timing]:
    """Time all forms in turns, round by round. Every form is warmed up once, unless that run was slow; then it counts.

    A form that returns `Seconds` has timed itself, so that its preparation is left out.
    """
    durations: dict[Place, list[float]] = {name: [] for name in forms}
    for name, run in forms.items():
        first = _seconds(run)
        if first > SLOW:
            durations[name].append(first)
    for _ in range(rounds):
        for name, run in forms.items():
            if len(durations[name]) < rounds:
                durations[name].append(_seconds(run))
    return {name: Timing(tuple(seconds)) for name, seconds in durations.items()}


def _seconds(run: Callable[[], object]) -> float:
    start = now()
    result = run()
    end = now()
    if isinstance(result, Seconds):
        return result
    return end - start


def now() -> float:
    """Return the current time in seconds, after all work of the device is done."""
    synchronize()
    if processor_time():
        return time.process_time()
    return time.perf_counter()


def processor_time() -> bool:
    """Return True if processor time is measured: on a CPU with one thread it does not depend on other load."""
    return compute_device().type == "cpu" and torch.get_num_threads() == 1


@dataclass(frozen=True)
class Goal:
    """A wanted number and its measured value."""

    text: str
    wanted: str
    value: float
    reached: bool


@dataclass(frozen=True)
class BenchTable:
    """A table of the report; cells are text. `picture` is a file next to the page that is shown below the table."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    picture: str = ""


@dataclass
class BenchReport:
    """Options of the command line (`recipe` holds its key=value arguments), and the results that a benchmark adds."""

    title: str
    quick: bool = False
    repetitions: int = 0
    recipe: tuple[str, ...] = ()
    device: str = "cpu"
    tables: list[BenchTable] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def pick(self, *, full: Place, quick: Place) -> Place:
        """Return `quick` in a quick report, whose sizes are tiny, and `full` otherwise."""
        if self.quick:
            return quick
        return full

    def sweep(self, forms: Mapping[Place, Mapping[str, Callable[[], object]]]) -> dict[Place, Timings]:
        """Time all forms at all places (lengths, models) in turns, because places are compared as well."""
        runs_by_place = {(place, name): run for place, runs in forms.items() for name, run in runs.items()}
        timed = interleaved(runs_by_place, self.repetitions)
        self.console += [f"{place}, {name}: {timing}" for (place, name), timing in timed.items()]
        return {place: Timings({name: timed[place, name] for name in runs}) for place, runs in forms.items()}

    def timed(self, forms: Mapping[str, Callable[[], object]]) -> Timings:
        """Time these forms in turns, at one place."""
        return self.sweep({self.title: forms})[self.title]

    def table(self, title: str, header: tuple[str, ...], cells: Iterable[Sequence[str]], picture: str = "") -> None:
        self.tables.append(BenchTable(title, header, list(cells), picture))

    def ratios(
        self,
        title: str,
        place: str,
        measured: Mapping[Place, Timings],
        pairs: Sequence[tuple[str, str]],
        more: Mapping[str, Sequence[str]],
    ) -> None:
        """Add a table with a row for each place: ratios of two forms' times, if both were measured, and further
        columns.
        """
        forms = " / ".join(max(measured.values(), key=len))
        header = (place, *(f"{form} / {base}" for form, base in pairs), *more, f"median over fastest, {forms}")
        cells = []
        for index, (row_place, timings) in enumerate(measured.items()):
            ratios = [times(timings.ratio(*pair)) if timings.keys() >= set(pair) else "" for pair in pairs]
            cells.append((str(row_place), *ratios, *(column[index] for column in more.values()), timings.spreads))
        self.table(title, header, cells)

    def at_least(self, text: str, limit: float, value: float) -> None:
        self.goals.append(Goal(text, f">= {limit:g}", value, value >= limit))

    def at_most(self, text: str, limit: float, value: float) -> None:
        self.goals.append(Goal(text, f"<= {limit:g}", value, value <= limit))


def times(ratio: float) -> str:
    """Return a ratio as text: `3.4x`, `120x`."""
    if 0.1 <= ratio < 10:
        return f"{ratio:.2f}x"
    if ratio < 1000:
        return f"{ratio:.3g}x"
    return f"{ratio:,.0f}x"


def per_token(measured: Mapping[int, Timings], form: str) -> list[str]:
    """Return a form's time per token at each length, relative to the first length."""
    per_length = [timings[form].fastest / length for length, timings in measured.items()]
    return [times(seconds / per_length[0]) for seconds in per_length]


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference of any entry, relative to its tensor's largest entry.

    Raises AssertionError above TOLERANCE, because times of different results can't be compared.
    """
    pairs = zip(found, expected, strict=True)
    largest = max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)
    assert largest <= TOLERANCE, f"the forms differ by {largest:.1e}"
    return largest


def publish(report: BenchReport, command: str, output: Path | None) -> None:
    """Print the page and the absolute times, and write the page to `output` if it is given."""
    page = markdown(report, command)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(Markdown(page))
    for line in report.console:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        output.write_text(page, encoding="utf-8")
        print(f"\nwritten to {output}")


def markdown(report: BenchReport, command: str) -> str:
    """Return the report as a Markdown page, with the command, machine and versions."""
    lines = [f"# {report.title}", "", f"`{command}`", ""]
    lines += [f"- {note}" for note in (f"machine: {machine(report)}", f"versions: {versions()}", *report.notes)]
    for rows in report.tables:
        lines += ["", f"## {rows.title}", "", *grid(rows.header, rows.cells)]
        lines += ["", f"![{rows.title}]({rows.picture})"] if rows.picture else []
    if report.goals:
        cells = [(g.text, g.wanted, f"{g.value:.3g}", "yes" if g.reached else "**no**") for g in report.goals]
        lines += ["", "## Goals", "", *grid(("goal", "wanted", "measured", "reached"), cells)]
    return "\n".join(lines) + "\n"


def grid(header: tuple[str, ...], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *cells)]


def machine(report: BenchReport) -> str:
    """Describe the machine: the GPU, or the processor with its vector width, and for timings its threads and load.

    Vectors are named as torch uses them (AVX2, AVX512), because ratios depend on their width.
    """
    if report.device != "cpu":
        return describe_device()
    words = [processor(), torch.backends.cpu.get_cpu_capability(), f"{os.cpu_count()} cores"]
    if report.repetitions:
        threads = torch.get_num_threads()
        words.append("1 thread, processor time" if processor_time() else f"{threads} threads, wall-clock time")
        words.append(f"load average {os.getloadavg()[0]:.1f} when measured")
    return ", ".join(words)


def processor() -> str:
    """Return the processor's name from /proc/cpuinfo, or from Python if that does not exist."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    return platform.processor() or platform.machine()


def versions() -> str:
    """Return Python's version and those of the compared packages."""
    packages = (f"{name} {installed(name) or 'not installed'}" for name in VERSIONS)
    return ", ".join([f"Python {platform.python_version()}", *packages])
