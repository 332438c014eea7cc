"""Selects the audit's cases from the command line, compares them, and prints the table.

The audit compares a training step in a parallel layout with the same step on one process. A case is a small model in
one layout. Each case is compared in float64 and in fp32. On GPUs it is compared only in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.device import visible_gpus
from hybridtron.parallel.pool import Pool, WorkerError
from hybridtron.problems import ConfigError, Problem, did_you_mean
from hybridtron.proving.audit.audit import Audit
from hybridtron.proving.audit.bugs import BUGS
from hybridtron.proving.audit.cases import ARCHITECTURES, LAYOUTS, Case, shrunk, table
from hybridtron.proving.audit.differences import PRECISIONS, AuditPrecision

CONSOLE = Console(width=None if sys.stdout.isatty() else 160)


def run(arguments: argparse.Namespace) -> int:
    """Run the audit with these options of the command line. Return the exit code: 0 if all cases agree, else 1."""
    if arguments.list:
        print_list()
        return 0
    cases = cases_of(arguments)
    precisions = PRECISIONS
    gpus = list[str]()
    if arguments.gpus:
        gpus = visible_gpus()
        cases = list(on_gpus(cases, len(gpus)))
        precisions = tuple(precision for precision in PRECISIONS if precision.name == "fp32")
    pool = Pool(gpus)
    try:
        comparison = Audit(pool, arguments.timeout, by_one_rank=bool(gpus))
        if audit(comparison, cases, arguments.fake_bug, precisions):
            return 0
        return 1
    finally:
        pool.close()


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line selects. The first line that applies counts:

    - with `--cases`: the named architectures in the named layouts
    - with only `--fake-bug`: the case that reveals this bug
    - else: a shrunk recipe, in the layout of its settings or in the named layouts

    Raises ConfigError if a name is unknown or a layout does not fit the recipe.
    """
    bug = arguments.fake_bug
    layouts = arguments.layouts
    if bug is not None:
        _known("--fake-bug", [bug], list(BUGS))
    if arguments.cases is not None:
        _require_no_settings(arguments)
        names = _chosen("--cases", arguments.cases, list(ARCHITECTURES))
        chosen = _chosen("--layouts", layouts or "all", list(LAYOUTS))
        return [case for case in table() if case.name in names and case.layout in chosen]
    own_layout = arguments.data > 1 or any(setting.startswith("parallel") for setting in arguments.settings)
    if bug is not None and not (arguments.settings or layouts or own_layout):
        return [case for case in table() if (case.name, case.layout) == (BUGS[bug].architecture, BUGS[bug].layout)]
    config = load(arguments.settings)
    if layouts is None and own_layout:
        return [fitting(config, _described(config.parallel, arguments.data), arguments.data)]
    names = _chosen("--layouts", layouts or "all", list(LAYOUTS))
    return list(in_layouts(config, names, skip=layouts in (None, "all")))


def _require_no_settings(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if settings or `--data` are given together with `--cases`, where they have no effect."""
    settings = [*arguments.settings, *([f"--data {arguments.data}"] if arguments.data > 1 else [])]
    if settings:
        layouts = f"`--cases {arguments.cases} --layouts NAME` with {', '.join(LAYOUTS)}"
        cure = f"choose layouts by {layouts}, or remove --cases to audit a recipe with `{' '.join(settings)}`"
        raise ConfigError(
            [
                Problem(
                    " ".join(settings),
                    "no-effect",
                    f"has no effect together with --cases, whose cases have fixed layouts: {cure}",
                )
            ]
        )


def on_gpus(cases: Sequence[Case], gpus: int) -> Iterator[Case]:
    """Yield the cases with at most `gpus` ranks, and print the names of the skipped cases.

    Raises ConfigError for fewer than two GPUs.
    """
    if gpus < 2:
        raise ConfigError(
            [Problem("--gpus", "unavailable", f"needs at least two GPUs, but this machine has {gpus}: remove --gpus")]
        )
    for case in cases:
        if case.world_size <= gpus:
            yield case
        else:
            print(f"skipped {case.name} {case.layout}, which needs {case.world_size} GPUs", file=sys.stderr)


def fitting(config: Config, layout: str, data: int) -> Case:
    """Return the case of a shrunk recipe, in the layout of the recipe's settings and with `data` data-parallel ranks.

    Raises ConfigError unless the layout fits both the recipe in full size and the shrunk recipe.
    """
    small = shrunk(config, data)
    case = Case(config.run.name, layout, small, data)
    require(RunPlan.of(config), case.world_size)
    require(case.plan, case.world_size)
    return case


def in_layouts(config: Config, layouts: Sequence[str], skip: bool) -> Iterator[Case]:
    """Yield the case of the shrunk recipe in each of the named layouts.

    A layout that does not fit the recipe raises ConfigError. With `skip`, the layout is printed and skipped instead.
    """
    for name in layouts:
        layout = LAYOUTS[name]
        try:
            yield fitting(replace(config, parallel=layout.on(config.parallel)), name, layout.data)
        except ConfigError as error:
            if not skip:
                raise
            print(f"skipped layout {name}: {error.problems[0]}", file=sys.stderr)


def _described(parallel: ParallelConfig, data: int) -> str:
    """Return a layout's name, such as `tp2-pp2-sp`."""
    axes = (
        ("tp", parallel.tensor),
        ("pp", parallel.pipeline),
        ("virtual", parallel.virtual_pipeline),
        ("cp", parallel.context),
        ("dp", data),
        ("ep", parallel.expert),
    )
    words = [f"{name}{size}" for name, size in axes if size > 1] + ["sp"] * (parallel.sequence and parallel.tensor > 1)
    if parallel.expert_tensor_ranks < parallel.tensor:
        words.append("et1")
    return "-".join(words) or "one process"


def audit(comparison: Audit, cases: Sequence[Case], bug: str | None, precisions: Sequence[AuditPrecision]) -> bool:
    """Compare every case in each precision. Print a table of comparisons, and the differences above their limits.

    Return True if no comparison failed and no difference is above its limit.
    """
    rows = Table(
        "model", "layout", "options", "type", "compared", "tensors within", "worst", "off by", "of limit", box=None
    )
    failures: list[str] = []
    with CONSOLE.status("") as status:
        for index, case in enumerate(cases):
            for precision in precisions:
                status.update(f"{index + 1}/{len(cases)} {case.name} {case.layout} {precision.name}")
                failures += compare(comparison, case, precision, bug, rows)
    CONSOLE.print(rows)
    for failure in failures:
        print(failure)
    count = len(cases) * len(precisions)
    print(f"{count} runs, {len(failures)} differ from one process" if failures else f"{count} runs equal one process")
    return not failures


def compare(comparison: Audit, case: Case, precision: AuditPrecision, bug: str | None, rows: Table) -> list[str]:
    """Compare one case in one precision, and add a row to the table.

    Return a list with one description if the case failed or has a difference above its limit, else an empty list.
    Raises WorkerError if a planted bug stops the parallel step: its wrong gradients have not been seen then.
    """
    label = f"{case.name} {case.layout} {precision.name}"
    try:
        differences = comparison.compare(case, precision, bug)
    except WorkerError as error:
        if bug is not None:
            raise
        rows.add_row(case.name, case.layout, case.options(), precision.name, "", "", "[red]failed[/red]", "", "")
        return [f"{label}: the parallel step failed: {error}"]
    worst = differences[0]
    wrong = [difference for difference in differences if not difference.passes]
    color = "red" if wrong else "green"
    largest = max(difference.relative for difference in differences if difference.is_tensor)
    rows.add_row(
        case.name,
        case.layout,
        case.options(),
        precision.name,
        str(len(differences)),
        f"{largest:.1e}",
        worst.what,
        f"{worst.relative:.1e}",
        f"[{color}]{worst.of_limit:.2g}[/{color}]",
    )
    named = ", ".join(f"{difference.what} by {difference.relative:.1e}" for difference in wrong[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    if wrong:
        return [f"{label}: {len(wrong)} of {len(differences)} values differ by more than their limits: {named}{more}"]
    return []


def print_list() -> None:
    """Print the names that `--layouts`, `--cases` and `--fake-bug` accept."""
    layouts = Table("layout", "ranks", box=None, title="--layouts", title_justify="left")
    for name, layout in LAYOUTS.items():
        layouts.add_row(name, str(layout.world_size))
    architectures = Table("name", "pattern", box=None, title="--cases", title_justify="left")
    for name, pattern in ARCHITECTURES.items():
        architectures.add_row(name, pattern)
    bugs = Table("name", "what goes wrong", "shown by default in", box=None, title="--fake-bug", title_justify="left")
    for name, bug in BUGS.items():
        bugs.add_row(name, bug.effect, f"{bug.architecture} {bug.layout}")
    CONSOLE.print(layouts, "", architectures, "", bugs)


def _chosen(option: str, text: str, known: list[str]) -> list[str]:
    """Return the names in a comma-separated option; `all` gives all known names. Raises ConfigError for other names."""
    names = known if text == "all" else text.split(",")
    _known(option, names, known)
    return names


def _known(option: str, names: Sequence[str], known: list[str]) -> None:
    """Raise ConfigError for names that are not known."""
    problems = [
        Problem(
            option,
            "unknown-name",
            f"does not accept {name!r}{did_you_mean(name, known)}: choose from {', '.join(known)}",
        )
        for name in names
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
