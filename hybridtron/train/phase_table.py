"""The phases of a run as a person plans them: steps, tokens, rates, what changes, what is read, what it costs.

From the configuration alone, and from the folders of tokens that are on this machine; nothing is built or read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybridtron.config.choices import LrPiece, Moments
from hybridtron.config.phases import Stretch, last_step, stretches
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mixture_spec import mixture_of, reading_plan
from hybridtron.planning.count import count
from hybridtron.storage.remote import is_url
from hybridtron.train.lr import learning_rate

MFU = 0.4  # that hours of devices are estimated with; large hybrids reach 0.33 to 0.47 on H100s


def print_timetable(config: Config) -> None:
    """All tables, one below the other."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160, no_color=True)
    for line in (f"{config.run.name}: {last_step(config):,} steps", *cost(config)):
        console.print(line, highlight=False)
    for table in (phase_table(config), source_table(config)):
        table.box, table.pad_edge = None, False
        console.print()
        console.print(table)
    print_changes(config, console)


def print_changes(config: Config, console: Console) -> None:
    """What each phase begins with, and what it changes."""
    for stretch in stretches(config):
        changes = list(changes_of(config, stretch))
        console.print(f"\n{stretch.phase.name}" + ("" if changes else ": as the phase before"))
        for change in changes:
            console.print(f"  {change}", highlight=False, markup=False)


def flops(config: Config, stretch: Stretch) -> float:
    """Of a phase, forward and backward."""
    return count(config.in_phase(stretch.phase).model, stretch.phase.seq_len).flops_per_token * stretch.tokens


def cost(config: Config) -> Iterator[str]:
    """Hours of devices, where the peak of one is known."""
    peak = config.cluster.peak_tflops
    total = sum(flops(config, stretch) for stretch in stretches(config))
    yield f"{total:.3g} FLOPs over all phases"
    if peak is not None:
        hours = total / (MFU * peak * 1e12) / 3600
        yield f"about {readable(hours)} GPU-hours on {config.cluster.name}, at {MFU:.0%} of {peak:g} TFLOP/s (a guess)"


def phase_table(config: Config) -> Table:
    """One row a phase."""
    peak = config.cluster.peak_tflops
    hours = () if peak is None else ("GPU-hours",)
    table = _table("phase", "steps", "tokens", "rows", "micro", "seq_len", "rate", "FLOPs/token", "FLOPs", *hours)
    for stretch in stretches(config):
        phase = stretch.phase
        rows = f"{phase.ramp.start} to {phase.global_batch}" if phase.ramp else str(phase.global_batch)
        amount = flops(config, stretch)
        table.add_row(
            phase.name,
            f"{stretch.first + 1:,} to {stretch.last:,}",
            readable(stretch.tokens),
            rows,
            str(phase.micro_batch),
            str(phase.seq_len),
            " to ".join(f"{rate:.3g}" for rate in rates_of(config, stretch)),
            readable(amount / stretch.tokens),
            f"{amount:.3g}",
            *(() if peak is None else (readable(amount / (MFU * peak * 1e12) / 3600),)),
        )
    return table


def rates_of(config: Config, stretch: Stretch) -> list[float]:
    """The learning rate at the first step, its peak where that is higher, and at the last."""
    after = [stretch.phase_tokens_at(stretch.first + 1), stretch.tokens]
    first, last = (learning_rate(config, stretch.index, tokens) for tokens in after)
    peak = stretch.phase.lr or 0.0
    return [first, peak, last] if peak > max(first, last) else [first, last]


def source_table(config: Config) -> Table:
    """What each phase reads of each source; epochs where its folder is on this machine."""
    table = _table("phase", "source", "share", "tokens", "epochs")
    table.columns[1].justify = "left"
    for stretch in stretches(config):
        for name, share, epochs in _reading(config, stretch):
            table.add_row(stretch.phase.name, name, f"{share:.1%}", readable(share * stretch.tokens), epochs)
    return table


def _reading(config: Config, stretch: Stretch) -> Iterator[tuple[str, float, str]]:
    data = config.data_of(stretch.phase)
    paths = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    try:
        if any(is_url(path) for path in paths):
            raise FolderError(data.path, "is a URL")
        found = mixture_of(data, lambda path: TokenFolder.open(Path(path)))
    except FolderError:
        whole = sum(entry.weight for entry in data.mixture.values())
        for name, entry in data.mixture.items():
            yield name, entry.weight / whole, "not here"
        if not data.mixture:
            yield data.path, 1.0, "not here"
        return
    for line in reading_plan(found, stretch.tokens):
        yield line.source, line.share, f"{line.epochs:.3g}"


def changes_of(config: Config, stretch: Stretch) -> Iterator[str]:
    """In words, what a phase begins with and what is other than in the phase before."""
    phase = stretch.phase
    if stretch.index == 0:
        yield f"starts from {f'the weights of {config.run.weights}' if config.run.weights else 'new weights'}"
    elif phase.init_from is not None:
        yield f"starts from the weights of {phase.init_from}, without moments"
    elif phase.moments is Moments.reset:
        yield "starts without the optimizer's moments"
    if phase.lr_piece is not LrPiece.rewarm:
        towards = f" to {phase.lr_to:g}" if phase.lr_to is not None else ""
        yield f"learning rate: {phase.lr_piece}{towards}"
    if phase.train is not None:
        yield f"trains {', '.join(phase.train)}"
    if stretch.index > 0:
        yield from _differences(_settings(config, stretch.index - 1), _settings(config, stretch.index))
    if phase.export is not None:
        yield f"is exported at its end: {config.run.dir}/export/{phase.name} ({phase.export})"


def _settings(config: Config, index: int) -> dict[str, Any]:
    """All that a phase may set, by its keys."""
    phase = config.phases[index]
    now = config.in_phase(phase)
    sections = {"optim": now.optim, "precision": now.precision, "states": config.states_of(phase)}
    found = {f"{name}.{key}": value for name, one in sections.items() for key, value in dataclasses.asdict(one).items()}
    layers = {f"layers.{letter}": options for letter, options in now.model.layers.items()}
    data = config.data_of(phase)
    mixture = {name: f"{entry.weight:g}" for name, entry in data.mixture.items()}
    reading = {"documents": config.documents_of(phase), "order": config.order_of(phase), "seq_len": phase.seq_len}
    return found | layers | {"data.path": data.path, "mixture": mixture} | reading | {"trains": phase.train}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key, value in after.items():
        if value != before.get(key) and key != "trains":
            yield f"{key}: {_shown(before.get(key))} -> {_shown(value)}"
    if after["trains"] is None and before["trains"] is not None:
        yield "trains all weights again"


def _shown(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _table(*headers: str) -> Table:
    table = Table()
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table
