"""Shared parts of all benchmarks: interleaved timing of several forms, and the report that a benchmark fills.

A form is a function that a benchmark compares with others: for example, one implementation of an op. A setting is a
condition under which all forms are measured: for example, a sequence length or a model.

A report has tables of ratios, goals with measured values, and console lines with absolute times. The report's page has
the tables and the goals. Console lines are only printed, because absolute times on a CPU say nothing about another
machine.
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
TOLERANCE = 1e-5  # limit on the difference between the results of two forms, relative to the largest expected element
MIB = 2**20
Setting = TypeVar("Setting")


@dataclass(frozen=True)
class Timing:
    """One form's durations in all rounds, in seconds."""

    seconds: tuple[float, ...]

    @property
    def fastest(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Difference between the median and the fastest time, divided by the fastest time."""
        return sorted(self.seconds)[len(self.seconds) // 2] / self.fastest - 1

    def __str__(self) -> str:
        return f"{self.fastest * 1e3:.1f} ms (median +{self.spread:.0%}, {len(self.seconds)} rounds)"


class Timings(dict[str, Timing]):
    """Timings of several forms, by the form's name."""

    def ratio(self, form: str, other: str) -> float:
        """Return the fastest time of `form`, divided by the fastest time of `other`."""
        return self[form].fastest / self[other].fastest

    @property
    def spreads(self) -> str:
        return " / ".join(f"+{timing.spread:.0%}" for timing in self.values())


class Seconds(float):
    """Duration that a form returns if it times itself.

    A form may also return a plain float. This is then a result, such as a loss, and not a duration.
    """


def time_in_turns(forms: Mapping[Setting, Callable[[], object]], rounds: int) -> dict[Setting, Timing]:
    """Time all forms in turns: each round runs every form once. Return the timings by form.

    Before the first round, every form runs once as a warm-up. A warm-up of more than SLOW seconds counts as the form's
    first round. If a form returns `Seconds`, this value replaces the measured time.
    """
    durations: dict[Setting, list[float]] = {name: [] for name in forms}
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
    """Wait until the device has finished all its work, and return the clock's time in seconds."""
    synchronize()
    if processor_time():
        return time.process_time()
    return time.perf_counter()


def processor_time() -> bool:
    """Return whether processor time is measured instead of wall-clock time.

    Processor time is measured on a CPU with one thread, because other processes on the machine do not change it.
    """
    return compute_device().type == "cpu" and torch.get_num_threads() == 1


@dataclass(frozen=True)
class Goal:
    """A limit on a measured value: `text` describes the value, and `wanted` is the limit as text, such as `>= 2`."""

    text: str
    wanted: str
    value: float
    reached: bool


@dataclass(frozen=True)
class BenchTable:
    """A table in the report, with text cells by row and column.

    `picture` names an image file in the page's folder. The page shows the image below the table.
    """

    title: str
    header: tuple[str, ...]
    cells: Sequence[Sequence[str]]
    picture: str = ""


@dataclass
class BenchReport:
    """A benchmark's options from the command line, and its results.

    quick        whether sizes are tiny (option)
    repetitions  how many rounds are run (option)
    recipe       key=value arguments that select a recipe (option)
    device       device on which the benchmark runs (option)
    tables       tables on the page
    goals        goals on the page
    notes        lines in the list at the top of the page
    console      lines that are only printed
    """

    title: str
    quick: bool = False
    repetitions: int = 0
    recipe: tuple[str, ...] = ()
    device: str = "cpu"
    tables: list[BenchTable] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def pick(self, *, full: Setting, quick: Setting) -> Setting:
        """Return the value `quick` if this report is quick, else the value `full`. Quick reports have tiny sizes."""
        if self.quick:
            return quick
        return full

    def sweep(self, forms: Mapping[Setting, Mapping[str, Callable[[], object]]]) -> dict[Setting, Timings]:
        """Time all forms at all settings, and return the timings by setting.

        `forms` maps a setting to its forms by name. Each round runs every form at every setting once, because a
        benchmark compares settings as well as forms.
        """
        runs_by_setting = {(setting, name): run for setting, runs in forms.items() for name, run in runs.items()}
        timed = time_in_turns(runs_by_setting, self.repetitions)
        self.console += [f"{setting}, {name}: {timing}" for (setting, name), timing in timed.items()]
        return {setting: Timings({name: timed[setting, name] for name in runs}) for setting, runs in forms.items()}

    def timed(self, forms: Mapping[str, Callable[[], object]]) -> Timings:
        """Time these forms in turns, at a single setting, and return their timings."""
        return self.sweep({self.title: forms})[self.title]

    def table(self, title: str, header: tuple[str, ...], cells: Iterable[Sequence[str]], picture: str = "") -> None:
        self.tables.append(BenchTable(title, header, list(cells), picture))

    def ratios(
        self,
        title: str,
        setting: str,
        measured: Mapping[Setting, Timings],
        pairs: Sequence[tuple[str, str]],
        more: Mapping[str, Sequence[str]],
    ) -> None:
        """Add a table of ratios with a row for each setting. `setting` is the first column's header.

        A pair of forms in `pairs` gives a column: the first form's time divided by the second form's time. A cell is
        empty if either form was not measured. `more` maps headers to further columns, each with a cell for every
        setting.
        """
        forms = " / ".join(max(measured.values(), key=len))
        header = (setting, *(f"{form} / {base}" for form, base in pairs), *more, f"median over fastest, {forms}")
        cells = []
        for index, (row_setting, timings) in enumerate(measured.items()):
            ratios = [times(timings.ratio(*pair)) if timings.keys() >= set(pair) else "" for pair in pairs]
            cells.append((str(row_setting), *ratios, *(column[index] for column in more.values()), timings.spreads))
        self.table(title, header, cells)

    def at_least(self, text: str, limit: float, value: float) -> None:
        """Add the goal that the measured `value` is at least `limit`."""
        self.goals.append(Goal(text, f">= {limit:g}", value, value >= limit))

    def at_most(self, text: str, limit: float, value: float) -> None:
        """Add the goal that the measured `value` is at most `limit`."""
        self.goals.append(Goal(text, f"<= {limit:g}", value, value <= limit))


def times(ratio: float) -> str:
    """Return a ratio as text: `3.4x`, `120x`."""
    if 0.1 <= ratio < 10:
        return f"{ratio:.2f}x"
    if ratio < 1000:
        return f"{ratio:.3g}x"
    return f"{ratio:,.0f}x"


def per_token(measured: Mapping[int, Timings], form: str) -> list[str]:
    """Return a form's time per token at each sequence length, divided by its time per token at the first length."""
    per_length = [timings[form].fastest / length for length, timings in measured.items()]
    return [times(seconds / per_length[0]) for seconds in per_length]


def difference(computed: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference between computed and expected elements.

    Differences are relative to the largest absolute element in each expected tensor. A result above TOLERANCE raises
    AssertionError, because the times of two forms can be compared only if their results agree.
    """
    pairs = zip(computed, expected, strict=True)
    largest = max(((actual - wanted).abs().max() / wanted.abs().max()).item() for actual, wanted in pairs)
    assert largest <= TOLERANCE, f"the results of two forms differ by {largest:.1e}; at most {TOLERANCE:g} is allowed"
    return largest


def publish(report: BenchReport, command: str, output: Path | None) -> None:
    """Print the report's page and console lines, and write the page to the file `output` if one is given."""
    page = markdown(report, command)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(Markdown(page))
    for line in report.console:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if output is not None:
        output.write_text(page, encoding="utf-8")
        print(f"\nwritten to {output}")


def markdown(report: BenchReport, command: str) -> str:
    """Return the report's page in Markdown, with the command, the machine and the package versions."""
    lines = [f"# {report.title}", "", f"`{command}`", ""]
    lines += [f"- {note}" for note in (f"machine: {machine(report)}", f"versions: {versions()}", *report.notes)]
    for table in report.tables:
        lines += ["", f"## {table.title}", "", *grid(table.header, table.cells)]
        lines += ["", f"![{table.title}]({table.picture})"] if table.picture else []
    if report.goals:
        cells = [(g.text, g.wanted, f"{g.value:.3g}", "yes" if g.reached else "**no**") for g in report.goals]
        lines += ["", "## Goals", "", *grid(("goal", "wanted", "measured", "reached"), cells)]
    return "\n".join(lines) + "\n"


def grid(header: tuple[str, ...], cells: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table's lines."""
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *cells)]


def machine(report: BenchReport) -> str:
    """Describe the machine: the GPU, or the processor with the vector instructions that torch uses.

    Vector instructions (AVX2, AVX512) are named because the ratios depend on them. If the report has timings on a CPU,
    the thread count, the kind of time and the load average are added.
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
    """Return the processor's name from /proc/cpuinfo, or from Python's `platform` if the file has no name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    return platform.processor() or platform.machine()


def versions() -> str:
    """Return the versions of Python and the packages in VERSIONS, as text."""
    packages = (f"{name} {installed(name) or 'not installed'}" for name in VERSIONS)
    return ", ".join([f"Python {platform.python_version()}", *packages])
