"""Writes the page of all results, benchmarks/gpu_queue.md, and lists the queue's parts with their state.

The page contains measured numbers only, each with the card, commit and versions that gave it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridtron.planning.rates import GPUS
from hybridtron.proving.gpu.queue.parts import PARTS, QueuePart
from hybridtron.proving.gpu.queue.rows import DONE, PartAttempt, Row, attempts, read
from hybridtron.proving.gpu.queue.run import PartState, state_of
from hybridtron.proving.measuring import grid

NAME = "gpu_queue.md"
TITLE = """# Measured on a GPU, part by part

`make gpu-measure` on a machine with a GPU, then `python -m hybridtron.proving.gpu.measure --page`

The parts are [a list](../hybridtron/proving/gpu/queue/parts.py), most valuable first. A part is done for a card and for
a digest of the code that it measures: when that code changes, the part is to be measured again, and the number stays
here with its commit. What was measured before there was this list is in [gpu.md](gpu.md)."""
NOTHING = "**No part has been measured yet, on any card.**"
HEADER = ("part", "what", "limit", "needs", "state")


def write(folder: Path) -> Path:
    """Write the page for a folder of results, next to the other measured pages."""
    path = folder.parents[1] / NAME
    path.write_text(text(attempts(read(folder))), encoding="utf-8")
    return path


def text(known: Sequence[PartAttempt]) -> str:
    """Return the page's text."""
    finished = [entry for entry in known if entry.state == DONE]
    lines = [TITLE, "", *([] if finished else [NOTHING, ""]), "## Parts", ""]
    cells = [(entry.name, entry.about, f"{entry.limit_s} s", needed(entry), of_cards(entry, known)) for entry in PARTS]
    lines += grid(HEADER, cells)
    for part in PARTS:
        for attempt in newest(part, finished):
            lines += ["", *section(attempt)]
    return "\n".join(lines) + "\n"


def needed(part: QueuePart) -> str:
    """Return the distributions that a part needs besides ours, as text."""
    return ", ".join(part.needs) or "-"


def of_cards(part: QueuePart, known: Sequence[PartAttempt]) -> str:
    """Describe the part's state, for the current code, on each card."""
    states = [state_of(part, card, known) for card in cards(part, known)]
    return "; ".join(described(state) for state in states)


def cards(part: QueuePart, known: Sequence[PartAttempt]) -> list[str]:
    """Return the card that the list asks for, then others with results."""
    return list(dict.fromkeys([part.card, *(attempt.begin["card"] for attempt in known if attempt.part == part.name)]))


def described(found: PartState) -> str:
    """Return a state as text: `h100: done (1a2b3c4, 2026-11-26)`."""
    if found.attempt is None:
        return f"{found.card}: undone"
    why = f", {found.attempt.why}" if found.attempt.why else ""
    return f"{found.card}: {found.state} ({stamp(found.attempt.begin)}{why})"


def stamp(begin: Row) -> str:
    """Return the commit and the day."""
    return f"{(begin['commit'] or 'no commit')[:7]}, {time.strftime('%Y-%m-%d', time.gmtime(begin['at']))}"


def newest(part: QueuePart, done: Sequence[PartAttempt]) -> Iterator[PartAttempt]:
    """Yield each card's last result, whichever code gave it."""
    for card in cards(part, done):
        card_attempts = [attempt for attempt in done if attempt.part == part.name and attempt.begin["card"] == card]
        yield from card_attempts[-1:]


def section(attempt: PartAttempt) -> list[str]:
    """Return a part's numbers as Markdown: a line for each case, and a table by kernel if there is one."""
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
    """Return True if a value belongs in a case's line."""
    return name not in ("part", "is", "case") and not isinstance(value, dict | list)


def shown(values: Row) -> str:
    """Return values as text: `ms 348.2, spread 0.01`."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items() if value is not None)


def number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def kernel_cells(kernel: Row) -> tuple[str, ...]:
    """Return a kernel's table cells, with the model's time for our kernels."""
    model = kernel["model_ms"]
    if not model:
        beside = ("-", "-")
    else:
        beside = (number(model), f"{kernel['ms'] / model:.2f}")
    return f"`{kernel['kernel']}`", str(kernel["calls"]), number(kernel["ms"]), *beside


def listed(known: Sequence[PartAttempt], card: str | None) -> list[str]:
    """Return the list as text, for this machine's card, or without one for each part's own card."""
    texts = [described(state_of(part, card or part.card, known)) for part in PARTS]
    width = max(len(part.name) for part in PARTS)
    lines = [f"{part.name:<{width}}  {part.limit_s:>3} s  {line}" for part, line in zip(PARTS, texts, strict=True)]
    kinds = ", ".join(GPUS)
    return [*lines, f"cards: {kinds}; a number belongs to the card that gave it"]
