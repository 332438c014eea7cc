"""Writes the page of all results, benchmarks/gpu_queue.md, and lists the queue's parts with their state.

A part is a group of measurements on a GPU, and a card is a kind of GPU. Each measured number on the page is listed with
the GPU, the commit and the package versions with which it was measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridtron.planning.rates import GPUS
from hybridtron.proving.gpu.queue.parts import PARTS, QueuePart
from hybridtron.proving.gpu.queue.rows import DONE, PartAttempt, Row, attempts, read
from hybridtron.proving.gpu.queue.run_parts import PartState, state_of
from hybridtron.proving.measuring import grid

NAME = "gpu_queue.md"
TITLE = """# Measured on a GPU, part by part

`make gpu-measure` on a machine with a GPU, then `python -m hybridtron.proving.gpu.measure --page`

The parts are [a list](../hybridtron/proving/gpu/queue/parts.py), most valuable first. A part is done for a card and for
a digest of the code that it measures. When this code changes, the part must be measured again, and the old number stays
here with its commit. Earlier measurements are in [gpu.md](gpu.md)."""
NOTHING_MEASURED = "**No part has been measured yet, on any card.**"
HEADER = ("part", "what", "limit", "needs", "state")


def write(folder: Path) -> Path:
    """Write the page for a folder of results, two levels above this folder, and return the page's path."""
    path = folder.parents[1] / NAME
    path.write_text(text(attempts(read(folder))), encoding="utf-8")
    return path


def text(known: Sequence[PartAttempt]) -> str:
    """Return the page's text: a table of all parts, then each part's newest results. `known` are all attempts."""
    finished = [entry for entry in known if entry.state == DONE]
    lines = [TITLE, "", *([] if finished else [NOTHING_MEASURED, ""]), "## Parts", ""]
    cells = [(entry.name, entry.about, f"{entry.limit_s} s", needed(entry), of_cards(entry, known)) for entry in PARTS]
    lines += grid(HEADER, cells)
    for part in PARTS:
        for attempt in newest(part, finished):
            lines += ["", *section(attempt)]
    return "\n".join(lines) + "\n"


def needed(part: QueuePart) -> str:
    """Return the distributions that a part needs in addition to the package's requirements, as text."""
    return ", ".join(part.needs) or "-"


def of_cards(part: QueuePart, known: Sequence[PartAttempt]) -> str:
    """Return a description of the part's state on each card, for the current code."""
    states = [state_of(part, card, known) for card in cards(part, known)]
    return "; ".join(described(state) for state in states)


def cards(part: QueuePart, known: Sequence[PartAttempt]) -> list[str]:
    """Return the card for which a part is planned, then all other cards with attempts at the part."""
    return list(dict.fromkeys([part.card, *(attempt.begin["card"] for attempt in known if attempt.part == part.name)]))


def described(state: PartState) -> str:
    """Return a state as text: `h100: done (1a2b3c4, 2026-11-26)`."""
    if state.attempt is None:
        return f"{state.card}: undone"
    why = f", {state.attempt.why}" if state.attempt.why else ""
    return f"{state.card}: {state.state} ({stamp(state.attempt.begin)}{why})"


def stamp(begin: Row) -> str:
    """Return an attempt's commit and day, from its first row, as text."""
    return f"{(begin['commit'] or 'no commit')[:7]}, {time.strftime('%Y-%m-%d', time.gmtime(begin['at']))}"


def newest(part: QueuePart, done: Sequence[PartAttempt]) -> Iterator[PartAttempt]:
    """Yield the last successful attempt on each card, even if the measured code has changed since."""
    for card in cards(part, done):
        card_attempts = [attempt for attempt in done if attempt.part == part.name and attempt.begin["card"] == card]
        yield from card_attempts[-1:]


def section(attempt: PartAttempt) -> list[str]:
    """Return the Markdown lines with an attempt's numbers: a table row for each case, and any tables of kernels."""
    begin = attempt.begin
    lines = [f"## {attempt.part}, {begin['gpu']}", "", f"`{begin['commit']}`, {begin['versions']}", ""]
    flat = [(row["case"], {name: value for name, value in row.items() if plain(name, value)}) for row in attempt.rows]
    lines += grid(("case", "numbers"), [(case, shown(values)) for case, values in flat])
    for row in attempt.rows:
        if table := row.get("by_kernel"):
            header = ("kernel", "calls", "ms a step", "ms by the model", "measured / model")
            lines += ["", *grid(header, [kernel_cells(kernel) for kernel in table])]
    return lines


def plain(name: str, value: Any) -> bool:
    """Return whether a value belongs in a case's table row: numbers and texts, but no lists and no labels."""
    return name not in ("part", "is", "case") and not isinstance(value, dict | list)


def shown(values: Row) -> str:
    """Return values as text: `ms 348.2, spread 0.01`."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items() if value is not None)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def kernel_cells(kernel: Row) -> tuple[str, ...]:
    """Return a kernel's table cells. For a kernel without a modelled time, the last two cells are `-`."""
    model = kernel["model_ms"]
    if not model:
        model_cells = ("-", "-")
    else:
        model_cells = (number(model), f"{kernel['ms'] / model:.2f}")
    return f"`{kernel['kernel']}`", str(kernel["calls"]), number(kernel["ms"]), *model_cells


def listed(known: Sequence[PartAttempt], card: str | None) -> list[str]:
    """Return a line for each part with its state on `card`. If `card` is None, each part's own card is used."""
    texts = [described(state_of(part, card or part.card, known)) for part in PARTS]
    width = max(len(part.name) for part in PARTS)
    lines = [f"{part.name:<{width}}  {part.limit_s:>3} s  {line}" for part, line in zip(PARTS, texts, strict=True)]
    kinds = ", ".join(GPUS)
    return [*lines, f"known cards: {kinds}; a part is measured separately on each card"]
