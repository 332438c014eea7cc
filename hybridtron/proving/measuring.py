"""What every benchmark shares: rounds in which all forms take turns, and the report that it fills as it goes.

A report has tables of ratios, goals with what was reached, and lines that only the console shows: absolute times,
which mean nothing on another machine and are therefore never written down for a CPU.
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
SLOW = 2.0  # seconds from which on a form is not warmed up before it is measured
TOLERANCE = 1e-5  # of forms that compute the same, as a share of each tensor's largest entry
MIB = 2**20
Place = TypeVar("Place")


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


class Timings(dict[str, Timing]):
    """The rounds of several forms, by name."""

    def ratio(self, form: str, other: str) -> float:
        """How many times as long a form took as another."""
        return self[form].fastest / self[other].fastest

    @property
    def spreads(self) -> str:
        return " / ".join(f"+{timing.spread:.0%}" for timing in self.values())


class Seconds(float):
    """What a form returns that has timed itself; any other number is a result, such as a loss."""


def interleaved(forms: Mapping[Place, Callable[[], object]], rounds: int) -> dict[Place, Timing]:
    """Time all forms in turns, round by round; every form runs once before, unless that took long.

    A form that returns `Seconds` has timed itself: what it did before it began to count is left out.
    """
    found: dict[Place, list[float]] = {name: [] for name in forms}
    for name, run in forms.items():
        first = _seconds(run)
        if first > SLOW:
            found[name].append(first)
    for _ in range(rounds):
        for name, run in forms.items():
            if len(found[name]) < rounds:
                found[name].append(_seconds(run))
    return {name: Timing(tuple(seconds)) for name, seconds in found.items()}


def _seconds(run: Callable[[], object]) -> float:
    start = now()
    own = run()
    end = now()
    return own if isinstance(own, Seconds) else end - start


def now() -> float:
    """Seconds by the clock that counts, when all that was asked of the device is done."""
    synchronize()
    return time.process_time() if processor_time() else time.perf_counter()


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


@dataclass(frozen=True)
class BenchTable:
    """A table of the report; cells are text. `picture` is a file beside the page that is shown below it."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    picture: str = ""


@dataclass
class BenchReport:
    """What the command line chose (`recipe` holds its key=value arguments), and what a benchmark adds to the page."""

    title: str
    quick: bool = False
    repetitions: int = 0
    recipe: tuple[str, ...] = ()
    device: str = "cpu"
    tables: list[BenchTable] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def sweep(self, forms: Mapping[Place, Mapping[str, Callable[[], object]]]) -> dict[Place, Timings]:
        """Time all forms at all places (lengths, models) in turns, since places are compared as well."""
        every = {(place, name): run for place, runs in forms.items() for name, run in runs.items()}
        found = interleaved(every, self.repetitions)
        self.console += [f"{place}, {name}: {timing}" for (place, name), timing in found.items()]
        return {place: Timings({name: found[place, name] for name in runs}) for place, runs in forms.items()}

    def timed(self, forms: Mapping[str, Callable[[], object]]) -> Timings:
        """The same at one place."""
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
        """A row for each place: one form's time over another's, where both were measured, and further columns."""
        forms = " / ".join(max(measured.values(), key=len))
        header = (place, *(f"{form} / {other}" for form, other in pairs), *more, f"median over fastest, {forms}")
        cells = []
        for index, (where, timings) in enumerate(measured.items()):
            found = [times(timings.ratio(*pair)) if timings.keys() >= set(pair) else "" for pair in pairs]
            cells.append((str(where), *found, *(column[index] for column in more.values()), timings.spreads))
        self.table(title, header, cells)

    def at_least(self, text: str, limit: float, value: float) -> None:
        self.goals.append(Goal(text, f">= {limit:g}", value, value >= limit))

    def at_most(self, text: str, limit: float, value: float) -> None:
        self.goals.append(Goal(text, f"<= {limit:g}", value, value <= limit))


def times(ratio: float) -> str:
    """A ratio for a table: `3.4x`, `120x`."""
    return f"{ratio:.2f}x" if 0.1 <= ratio < 10 else f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def per_token(measured: Mapping[int, Timings], form: str) -> list[str]:
    """A form's time per token at each length, over that at the first one."""
    found = [timings[form].fastest / length for length, timings in measured.items()]
    return [times(one / found[0]) for one in found]


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest of any entry, as a share of its tensor's largest entry. Forms that differ are not compared."""
    pairs = zip(found, expected, strict=True)
    largest = max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)
    assert largest <= TOLERANCE, f"the forms differ by {largest:.1e}"
    return largest


def publish(report: BenchReport, command: str, output: Path | None) -> None:
    """Print the page and the absolute times, and write the page where it is wanted."""
    page = markdown(report, command)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(Markdown(page))
    for line in report.console:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        output.write_text(page, encoding="utf-8")
        print(f"\nwritten to {output}")


def markdown(report: BenchReport, command: str) -> str:
    """The report as a page of its own, with what it takes to measure it again."""
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
    """The lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *cells)]


def machine(report: BenchReport) -> str:
    """The processor, and where times were taken how much of it was used, and how busy it was with other things.

    Its vectors are named as torch uses them (AVX2, AVX512), since ratios differ by their width.
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
    """The processor's name by the kernel, or what Python knows where there is no /proc."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> str:
    """Python's version and those of what is compared."""
    found = (f"{name} {installed(name) or 'not installed'}" for name in VERSIONS)
    return ", ".join([f"Python {platform.python_version()}", *found])
