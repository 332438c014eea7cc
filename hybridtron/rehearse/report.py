"""Report of a rehearsal: tables for the console, and plain values for JSON.

A rehearsal simulates one rank's training steps without a GPU: first a step with few micro-batches, then a step with
more micro-batches. All times are modelled, not measured.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hybridtron.config.checks.experts import expert_problems
from hybridtron.config.checks.parallel import parallel_problems
from hybridtron.config.checks.precision import precision_problems
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import loads_change_memory
from hybridtron.planning.memory import imbalance_line, imbalance_that_fits
from hybridtron.planning.rates import UNSEEN
from hybridtron.rehearse.rehearsal import Rehearsed
from hybridtron.rehearse.step_time import PartTime, Work

PARTS = ("forward", "backward", "update")
MAX_LISTED = 12  # maximum number of allocation sites in the memory table
NOT_SEEN = f"Not modelled: {UNSEEN}; caches; the efficiency of other packages' kernels."


def as_json(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return one rank's results as plain values for JSON."""
    step = rehearsed.step
    time = rehearsed.time
    whole = time.whole
    return {
        "rank": step.rank,
        "gpu": rehearsed.gpu.name,
        "micro_batches": step.micro_batches,
        "implementations": {op: name for op, name, _ in step.implementations},
        "memory": {
            "peak": step.peak,
            "planned": rehearsed.planned,
            "held": [[part, place, size] for (part, place), size in step.timeline.at_peak.most_common()],
        },
        "per_micro_batch": _part_json(time.micro_batch),
        "once": _part_json(time.once),
        "other_bytes_per_token": other_bytes(time.micro_batch) / rehearsed.tokens_of_micro_batch,
        "waits": [[part, place, kind, times] for (part, place, kind), times in waits_of(rehearsed).items()],
        "sent": [[*call, *amounts] for call, amounts in sent_of(rehearsed).items()],
        "kernels": [
            {
                "name": kernel.name, "grid": list(kernel.grid), "launches": kernel.launches,
                "registers": kernel.compiled.registers, "shared": kernel.compiled.shared,
                "spilled": kernel.compiled.spilled, "warps": kernel.time.warps, "rounds": kernel.time.rounds,
                "bound": kernel.time.bound,
                "seconds": kernel.time.seconds, "of_roofline": kernel.time.share,
            }
            for kernel in rehearsed.kernels
        ],
        "model": {
            "step_seconds": time.seconds, "tokens_per_second": rehearsed.tokens_per_second, "mfu": rehearsed.mfu,
            "launches": whole.launches, "exposed_seconds": whole.exposed, "bound": whole.bound,
            "step_host_seconds": whole.host, "step_device_seconds": whole.device,
            "launch_seconds": time.micro_batch.host, "device_seconds": time.micro_batch.device,
        },
    }  # fmt: skip


def _part_json(part: PartTime) -> dict[str, Any]:
    costs = [{"part": key[0], "kind": key[1], **dataclasses.asdict(cost)} for key, cost in part.costs.items()]
    return {"costs": costs, "waits": part.waits, "sent_bytes": part.sent, "seconds": part.seconds}


def other_bytes(part: PartTime) -> float:
    """Return the bytes that all operations except matrix products and attention read and write."""
    return sum(cost.bytes for (_, kind), cost in part.costs.items() if kind not in ("products", "attention"))


def waits_of(rehearsed: Rehearsed) -> Counter[tuple[str, str, str]]:
    """Count the waits in the rehearsed step with more micro-batches. Keys are (part of the step, source line, kind)."""
    step = rehearsed.step
    return Counter((wait.part, wait.place, wait.kind) for wait in (*step.passes_of_many.waits, *step.update.waits))


def sent_of(rehearsed: Rehearsed) -> dict[tuple[str, str, int, bool, bool], tuple[int, int]]:
    """Return key -> (number of calls, bytes) for communication calls in the rehearsed step with more micro-batches.

    A key has these values:

    - the call's source line
    - the call's kind
    - number of ranks
    - whether the call is between nodes
    - whether the call is hidden: other operations run between the call and the wait for its result

    Copies between host and device count as calls.
    """
    step = rehearsed.step
    amounts: dict[tuple[str, str, int, bool, bool], tuple[int, int]] = {}
    passes = step.passes_of_many
    for call in (*passes.sent, *passes.copies, *step.update.sent):
        key = (call.place, call.kind, call.ranks, call.between_nodes, call.waited > call.asked)
        calls, size = amounts.get(key, (0, 0))
        amounts[key] = calls + 1, size + call.bytes
    return amounts


def forms_of(rehearsed: Rehearsed) -> dict[str, list[str]]:
    """Return two lists of names: "kernels" has the ops with our Triton kernels, "attention" has attention kernels."""
    operations = rehearsed.step.passes_of_many.operations
    ops = {operation.name.partition(".")[0] for operation in operations if operation.kind == "kernel"}
    attention = {operation.name.partition(" ")[0] for operation in operations if operation.kind == "attention"}
    return {"kernels": sorted(ops), "attention": sorted(attention)}


def shown_parts(rehearsed: Rehearsed) -> dict[str, Any]:
    """Return a rank's totals for a suite's records. The totals are not divided by source line or kernel."""
    whole = as_json(rehearsed)
    once = whole["once"]["waits"]
    part = rehearsed.time.micro_batch
    return {
        "peak": whole["memory"]["peak"],
        "planned": whole["memory"]["planned"],
        "tokens_per_second": whole["model"]["tokens_per_second"],
        "step_seconds": whole["model"]["step_seconds"],
        "exposed_seconds": whole["model"]["exposed_seconds"],
        "mfu": whole["model"]["mfu"],
        "other_bytes_per_token": whole["other_bytes_per_token"],
        "launch_share": part.host / part.device,
        "launch_s": part.host / part.launches,
        "waits": once + whole["per_micro_batch"]["waits"] * whole["micro_batches"],
        "sent": rehearsed.time.whole.sent,
    }


def print_tables(rehearsals: Sequence[Rehearsed]) -> None:
    """Print each rank's tables, and the slowest rank's modelled speed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140, no_color=True)
    for rehearsed in rehearsals:
        for table in tables(rehearsed):
            if console.is_terminal:
                table.box = box.SIMPLE_HEAD
            else:
                table.box = None
            table.pad_edge = False
            title = table.title
            table.title = None
            console.print(f"\n{title}", highlight=False, markup=False)
            console.print(table)
    for rehearsed in rehearsals:
        for line in load_lines(rehearsed):
            console.print(line, highlight=False, markup=False)
    console.print(f"\n{NOT_SEEN}", highlight=False)
    slowest = max(rehearsals, key=lambda result: result.time.seconds)
    console.print(launch_line(slowest), highlight=False)
    console.print(
        f"Modelled, not measured: {slowest.time.seconds:.3f} s a step, {slowest.tokens_per_second:,.0f} tokens/s "
        f"a GPU, MFU {slowest.mfu:.1%} on {slowest.world} x {slowest.gpu.name}, {slowest.time.whole.bound}",
        highlight=False,
    )


def load_lines(rehearsed: Rehearsed) -> list[str]:
    """Return lines that say whether the rank fits on the GPU with uneven expert loads; [] if loads change no memory."""
    if not loads_change_memory(rehearsed.phase):
        return []
    memory = rehearsed.gpu.memory
    peak = rehearsed.step.peak
    fits = "fits in" if peak <= memory else "DOES NOT FIT in"
    lines = [
        f"With {rehearsed.imbalance:g} times the tokens of even loads, rank {rehearsed.step.rank} needs "
        f"{peak / 1e9:.1f} GB for tensors, and {fits} {memory / 1e9:.0f} GB."
    ]
    most = imbalance_that_fits(rehearsed.phase, rehearsed.world, memory)
    if most is not None:
        lines.append(imbalance_line(most, rehearsed.phase, rehearsed.world, memory))
    return lines


def launch_line(rehearsed: Rehearsed) -> str:
    """Return a line that compares the step's modelled host time with its modelled device time.

    If the host's time is longer, the line also names settings that help.
    """
    step = rehearsed.time.whole
    text = (
        f"In a step, launching takes the host {1e3 * step.host:.1f} ms, and the work takes the device "
        f"{1e3 * step.device:.1f} ms (both modelled): {step.bound}."
    )
    if step.host <= step.device:
        return text
    cure = f"Set a larger phases.{rehearsed.phase.index}.micro_batch"
    if _can_compile(rehearsed.phase):
        cure = f"{cure}, or run.compile=true"
    return f"{text} {cure}, so that each launch does more work."


def _can_compile(phase: ResolvedPhase) -> bool:
    """Return False if the phase has settings that `check` refuses together with run.compile=true, such as experts."""
    run = dataclasses.replace(phase.config.run, compile=True)
    compiled = dataclasses.replace(phase, config=dataclasses.replace(phase.config, run=run))
    problems = (*expert_problems(compiled), *precision_problems(compiled), *parallel_problems(compiled, None))
    return not problems


def tables(rehearsed: Rehearsed) -> Iterable[Table]:
    """Yield one rank's tables. Tables that would be empty are left out."""
    yield _implementations(rehearsed)
    yield _costs(rehearsed)
    if rehearsed.kernels:
        yield _kernels(rehearsed)
    if waits := waits_of(rehearsed):
        yield _waits(waits)
    if rehearsed.world > 1 or rehearsed.step.passes_of_many.copies:
        yield _sent(rehearsed)
    yield _memory(rehearsed)


def _table(title: str, *headers: str, left: int = 1) -> Table:
    table = Table(title=title)
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right")
    return table


def _implementations(rehearsed: Rehearsed) -> Table:
    step = rehearsed.step
    place = (
        f"rank {step.rank} of {rehearsed.world} (pipeline {step.place.pipeline.rank}, tensor {step.place.tensor.rank})"
    )
    table = _table(
        f"{rehearsed.phase.config.run.name}, {place}, {rehearsed.gpu.name}", "op", "implementation", "why", left=3
    )
    for row in step.implementations:
        table.add_row(*row)
    return table


def _costs(rehearsed: Rehearsed) -> Table:
    """Return the cost table, with a row for each kind of work.

    The first columns have the costs of a micro-batch's forward and backward pass. The last two columns have the costs
    that arise once in a step, regardless of its number of micro-batches.
    """
    time = rehearsed.time
    passes = time.micro_batch.costs
    once: dict[str, Work] = {}
    for (_, kind), cost in time.once.costs.items():
        once.setdefault(kind, Work()).add(cost)
    kinds = sorted({kind for _, kind in (*passes, *time.once.costs)}, key=lambda kind: -_seconds(passes, kind))
    per_token = other_bytes(time.micro_batch) / rehearsed.tokens_of_micro_batch
    title = (
        f"A micro-batch of {rehearsed.tokens_of_micro_batch:,} tokens ({time.micro_batches} a step): "
        f"{per_token / 1e6:.2f} MB a token, not counting products and attention; times are modelled"
    )
    table = _table(title, "", "launches", "", "GB", "", "TFLOP", "", "ms", "", "once a step: GB", "ms")
    table.add_row("", *("forward", "backward") * 4, "", "")
    for kind in kinds:
        forward, backward = (passes.get((part, kind), Work()) for part in PARTS[:2])
        fixed = once.get(kind, Work())
        numbers = [
            text
            for name, scale, form in (("launches", 1, ".0f"), ("bytes", 1e-9, ".2f"), ("flops", 1e-12, ".2f"))
            for cost in (forward, backward)
            for text in [format(getattr(cost, name) * scale, form)]
        ]
        times = [f"{1e3 * cost.seconds:.2f}" for cost in (forward, backward)]
        table.add_row(kind, *numbers, *times, f"{fixed.bytes * 1e-9:.2f}", f"{1e3 * fixed.seconds:.2f}")
    return table


def _seconds(costs: dict[tuple[str, str], Work], kind: str) -> float:
    return sum(cost.seconds for (_, other), cost in costs.items() if other == kind)


def _kernels(rehearsed: Rehearsed) -> Table:
    title = f"Triton kernels in a step of {rehearsed.step.many} micro-batches; times are modelled"
    table = _table(
        title, "kernel", "grid", "launches", "registers", "spilled", "shared", "warps", "rounds", "bound by", "ms each",
        "of roofline",
    )  # fmt: skip
    for kernel in rehearsed.kernels:
        compiled = kernel.compiled
        grid = " x ".join(map(str, kernel.grid))
        numbers = (
            *(kernel.launches, compiled.registers, compiled.spilled, compiled.shared),
            *(kernel.time.warps, kernel.time.rounds),
        )
        milliseconds = f"{1e3 * kernel.time.seconds:.3f}"
        table.add_row(
            kernel.name, grid, *map(str, numbers), kernel.time.bound, milliseconds, f"{kernel.time.share:.0%}"
        )
    return table


def _waits(waits: Counter[tuple[str, str, str]]) -> Table:
    table = _table("Waits of the host or of a stream", "in", "line", "for", "times", left=3)
    for row, times in waits.most_common():
        table.add_row(*row, str(times))
    return table


def _sent(rehearsed: Rehearsed) -> Table:
    step = rehearsed.step
    title = f"Sent by this rank in a step of {step.many} micro-batches"
    table = _table(title, "line", "what", "ranks", "between nodes", "hidden", "calls", "GB", left=2)
    for (place, kind, ranks, between, hidden), (calls, size) in sent_of(rehearsed).items():
        marks = ("yes" if mark else "" for mark in (between, hidden))
        table.add_row(place, kind, str(ranks), *marks, str(calls), f"{size / 1e9:.3f}")
    return table


def _memory(rehearsed: Rehearsed) -> Table:
    step = rehearsed.step
    title = f"Peak memory of tensors: {step.peak / 1e9:.2f} GB; planned {rehearsed.planned / 1e9:.2f} GB"
    table = _table(title, "made in", "line", "GB", left=2)
    for (part, place), size in step.timeline.at_peak.most_common(MAX_LISTED):
        table.add_row(part, place, f"{size / 1e9:.3f}")
    if step.other_lanes:
        table.add_row("", "states of lanes that are not rehearsed", f"{step.other_lanes / 1e9:.3f}")
    rest = step.peak - step.other_lanes - sum(size for _, size in step.timeline.at_peak.most_common(MAX_LISTED))
    table.add_row("", "all others", f"{rest / 1e9:.3f}")
    return table
