"""Tables for planning a run: its phases with steps, tokens, learning rates, costs, sources and changed settings.

The setting `run.plan=true` prints the tables. They are computed from the configuration, and from the manifests of token
folders on this machine. No model is built, and no tokens are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridtron.config.choices import LrPiece, Moments
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.units import readable
from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mixture_spec import Epochs, mixture_of, named_sources, reading_plan
from hybridtron.planning.count import count
from hybridtron.storage.remote import is_url
from hybridtron.train.lr import learning_rate

MFU = 0.4  # assumed model FLOPs utilization, for estimated GPU-hours; large hybrids reach 0.33 to 0.47 on H100s


def print_timetable(plan: RunPlan) -> None:
    """Print a run's costs, the tables of phases and sources, and the changes in each phase."""
    console = wide_console()
    for line in (f"{plan.config.run.name}: {plan.last_step:,} steps", *cost(plan)):
        console.print(line, highlight=False)
    for table in (phase_table(plan), source_table(plan)):
        table.box = None
        table.pad_edge = False
        console.print()
        console.print(table)
    print_changes(plan, console)


def print_changes(plan: RunPlan, console: Console) -> None:
    """Print for each phase its starting point, and the settings that the phase changes."""
    for phase in plan.phases:
        changes = list(changes_of(phase))
        console.print(f"\n{phase.settings.name}" + ("" if changes else ": same settings as the phase before"))
        for change in changes:
            console.print(f"  {change}", highlight=False, markup=False)


def flops(phase: ResolvedPhase) -> float:
    """Return the FLOPs of all forward and backward passes in a phase."""
    return count(phase.arch, phase.settings.seq_len).flops_per_token * phase.tokens


def device_hours(flops: float, peak_tflops: float) -> float:
    """Return how many hours one device needs for these FLOPs, at the assumed MFU."""
    return flops / (MFU * peak_tflops * 1e12) / 3600


def cost(plan: RunPlan) -> Iterator[str]:
    """Yield a line with a run's FLOPs, and a line with estimated GPU-hours if the device's peak FLOP/s are known."""
    cluster = plan.config.cluster
    peak = cluster.peak_tflops
    total = sum(flops(phase) for phase in plan.phases)
    yield f"{total:.3g} FLOPs over all phases"
    if peak is not None:
        hours = device_hours(total, peak)
        yield f"about {readable(hours)} GPU-hours on {cluster.name}, at {MFU:.0%} of {peak:g} TFLOP/s (a guess)"


def phase_table(plan: RunPlan) -> Table:
    """Build a table with one row for each phase.

    The column `rows` is the number of sequences in a global batch. The column `micro` is the number of sequences in a
    micro-batch.
    """
    peak = plan.config.cluster.peak_tflops
    table = table_of("phase", "steps", "tokens", "rows", "micro", "seq_len", "learning rate", "FLOPs/token", "FLOPs")
    if peak is not None:
        table.add_column("GPU-hours", justify="right")
    for phase in plan.phases:
        settings = phase.settings
        ramp = settings.ramp
        batch = settings.global_batch
        rows = f"{ramp.start} to {batch}" if ramp else str(batch)
        amount = flops(phase)
        table.add_row(
            settings.name,
            f"{phase.start_step + 1:,} to {phase.end_step:,}",
            readable(phase.tokens),
            rows,
            str(settings.micro_batch),
            str(settings.seq_len),
            " to ".join(map(_rate, rates_of(plan.phases, phase))),
            readable(amount / phase.tokens),
            f"{amount:.3g}",
            *(() if peak is None else (readable(device_hours(amount, peak)),)),
        )
    return table


def _rate(rate: float) -> str:
    """Format a learning rate in short scientific notation, such as `4e-4`; zero as `0`."""
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    if rate:
        return f"{float(mantissa):g}e{int(exponent)}"
    return "0"


def rates_of(phases: Sequence[ResolvedPhase], phase: ResolvedPhase) -> list[float]:
    """Return a phase's learning rates: at the first step, at the peak, and at the last step.

    The peak is left out unless it is higher than the first and the last rate.
    """
    after = [phase.phase_tokens_at(phase.start_step + 1), phase.tokens]
    first, last = (learning_rate(phases, phase.index, tokens) for tokens in after)
    peak = phase.settings.lr or 0.0
    if peak > max(first, last):
        return [first, peak, last]
    return [first, last]


def source_table(plan: RunPlan) -> Table:
    """Build a table with one row for each source in each phase.

    Learned tokens are the tokens that count in the loss. Their share, and the epochs, are shown only if the source's
    folder is on this machine.
    """
    table = table_of("phase", "source", "share", "tokens", "epochs", "learned", "folder", numbers_from=2)
    table.columns[-1].justify = "left"
    for phase in plan.phases:
        for line in sources_of(phase):
            table.add_row(
                phase.settings.name,
                Text(line.source),
                f"{line.share:.1%}",
                readable(line.share * phase.tokens),
                line.shown_epochs,
                line.shown_learned,
                Text(line.place),
            )
    return table


def sources_of(phase: ResolvedPhase) -> list[Epochs]:
    """Return the name, share, tokens and epochs for each source in a phase.

    If a source's path is a URL, or its folder can't be opened, names and shares come from the configuration, and the
    epochs of all sources are None.
    """
    data = phase.data
    paths = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    try:
        if any(is_url(path) for path in paths):
            raise FolderError(data.path, "is a URL")
        mixture = mixture_of(data, lambda path: TokenFolder.open(Path(path)))
    except FolderError:
        return [
            Epochs(name or place, share, round(share * phase.tokens), epochs=None, place=place)
            for name, place, share in named_sources(data)
        ]
    return reading_plan(mixture, phase.tokens)


def changes_of(phase: ResolvedPhase) -> Iterator[str]:
    """Yield lines with a phase's starting point, and with the settings in which it differs from the phase before."""
    settings = phase.settings
    run = phase.config.run
    if phase.before is None and run.weights is None and run.tunes is not None:
        yield f"starts from run.weights, which is not set; set it to {run.tunes}"
    elif phase.before is None:
        yield f"starts from {f'the weights of {run.weights}' if run.weights else 'new weights'}"
    elif settings.init_from is not None:
        yield f"starts from the weights of {settings.init_from}, without the optimizer's moments"
    elif not phase.keeps_optimizer:
        yield f"starts with the state of {phase.optim.name} at zero, without the moments of {phase.before.optim.name}"
    elif settings.moments is Moments.reset:
        yield "starts without the optimizer's moments"
    if settings.lr_piece is not LrPiece.rewarm:
        if settings.lr_to is not None:
            towards = f" to {settings.lr_to:g}"
        else:
            towards = ""
        yield f"learning rate: {settings.lr_piece}{towards}"
    if phase.trained is not None:
        yield f"trains {', '.join(phase.trained)}"
    if phase.before is not None:
        yield from _differences(_settings(phase.before), _settings(phase))
    if settings.export is not None:
        yield f"is exported at its end: {run.dir}/export/{settings.name} ({settings.export})"


def _settings(phase: ResolvedPhase) -> dict[str, Any]:
    """Return the values of all settings that a phase may change, by key."""
    sections = {"optim": phase.optim, "precision": phase.precision, "states": phase.states}
    by_section = {
        f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in dataclasses.asdict(section).items()
    }
    layers = {f"layers.{letter}": options for letter, options in phase.model.layers.items()}
    reading = {"reads": named_sources(phase.data), "data.source": phase.data.source, "data.epochs": phase.data.epochs}
    reading |= {"documents": phase.documents, "order": phase.order, "seq_len": phase.settings.seq_len}
    adapters = phase.model.adapters and dataclasses.asdict(phase.model.adapters)
    return by_section | layers | {"adapters": adapters} | reading | {"trains": phase.trained}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key, value in after.items():
        if value != before.get(key) and key != "trains":
            yield f"{key}: {_shown(before.get(key))} -> {_shown(value)}"
    if after["trains"] is None and before["trains"] is not None:
        yield "trains all weights again"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def table_of(*headers: str, numbers_from: int = 1) -> Table:
    """Build an empty table. The columns from index `numbers_from` on are right-aligned, for numbers."""
    table = Table()
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index >= numbers_from else "left")
    return table


def wide_console() -> Console:
    """Return a console for the terminal; without a terminal, a console for plain text with 160 columns."""
    console = Console()
    if console.is_terminal:
        return console
    return Console(width=160, no_color=True)
