"""Span-expanded attention against window attention and full attention, over the length: time and peak memory.

Chunks of 256 tokens that read 256 tokens of the past see as many keys at most as a window of 256 tokens taken by blocks
of 256 queries; what is measured is what summaries, the choice and the gathering cost beyond that. Queries, keys and
values are random, so that the chosen blocks lie anywhere, which is the worst case for a cache. Before, the blocked form
is compared with the reference, outputs and gradients.

Peak memory is that of a fresh process: see `probe`.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.span import (
    CarriedBlocks,
    ChoiceRule,
    SpanCut,
    SpanInputs,
    SpanSegment,
    choose_by_relevance,
    span_attention,
)
from hybridtron.proving.measuring import (
    BenchReport,
    BenchSettings,
    BenchTable,
    Contender,
    Goal,
    Timing,
    interleaved,
    times,
)

from .attention import Row, full, windowed
from .attention import Sizes as AttentionSizes
from .scan import in_fresh_process, resident

TOLERANCE = 1e-5
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """What is measured. Full attention is tried up to `full` tokens; memory at the lengths of `memory`."""

    heads: int
    head_dim: int
    chunk: int
    block: int
    blocks: int
    lengths: tuple[int, ...]
    full: int
    memory: tuple[int, ...]

    def rows(self) -> AttentionSizes:
        return AttentionSizes(self.heads, self.head_dim, self.chunk, (), 0)


FULL = Sizes(4, 64, 256, 32, 8, (4096, 8192, 16384, 32768), 16384, (16384, 32768))
QUICK = Sizes(2, 8, 32, 8, 4, (64, 256), 256, (256,))


def spanned(sizes: Sizes) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Span-expanded attention with all that it takes: summaries, relevance, choice, attention."""
    rule = ChoiceRule(sizes.blocks, previous=False)

    def run(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        batch, length = q_BLHK.shape[:2]
        cut = SpanCut(sizes.chunk, sizes.block, (SpanSegment(slice(0, batch), 0, length),))
        carried = CarriedBlocks(sizes.chunk // sizes.block, 2 * sizes.chunk // sizes.block)
        chosen, _ = choose_by_relevance(cut, rule, q_BLHK, k_BLHK, v_BLHK, None, carried)
        return span_attention(SpanInputs(q_BLHK, k_BLHK, v_BLHK, cut, chosen))

    return run


def bench(settings: BenchSettings) -> BenchReport:
    """The sweep over the length."""
    sizes, device = (QUICK if settings.quick else FULL), compute_device()
    _compare(sizes, device)
    measured = _measure(sizes, device, settings)
    peaks = {
        length: {form: peak_memory(form, length, settings.quick) for form in ("span", "window")}
        for length in sizes.memory
    }
    tables = [_time_table(sizes, measured), _memory_table(peaks)]
    notes = [
        f"batch 1, {sizes.heads} heads of {sizes.head_dim}, fp32, forward and backward; chunks and window of "
        f"{sizes.chunk} tokens, {sizes.blocks} blocks of {sizes.block} tokens retrieved; full is torch's causal "
        "scaled_dot_product_attention",
        f"{settings.repetitions} rounds of all forms and lengths; per doubling: our time over that of the row above",
        "outputs and gradients of the blocked form agree with the reference's; peak memory is what one pass adds to a "
        "fresh process that holds queries, keys and values",
    ]
    console = [f"{name} at {length}: {timing}" for length, forms in measured.items() for name, timing in forms.items()]
    goals = [] if settings.quick else _goals(measured, peaks)
    return BenchReport("Span-expanded attention", device.type, tables, goals, notes, console)


def _compare(sizes: Sizes, device: torch.device) -> None:
    row, run = Row(sizes.rows(), 4 * sizes.chunk, device), spanned(sizes)
    ours = row.forward_backward(run)
    with force(span_attention="reference"):
        wanted = row.forward_backward(run)
    difference = max((a - b).abs().max().item() for a, b in zip(ours, wanted, strict=True))
    assert difference <= TOLERANCE, f"the form and the reference differ by {difference:.1e}"


def _measure(sizes: Sizes, device: torch.device, settings: BenchSettings) -> dict[int, dict[str, Timing]]:
    """All forms at all lengths in turns, since lengths are compared as well."""
    forms: dict[str, Contender] = {}
    for length in sizes.lengths:
        row = Row(sizes.rows(), length, device)
        runs = {"span": spanned(sizes), "window": windowed(sizes.chunk)}
        if length <= sizes.full:
            runs["full"] = full
        for name, run in runs.items():
            forms[f"{name} {length}"] = Contender(partial(row.forward_backward, run), settings.repetitions)
    measured: dict[int, dict[str, Timing]] = {length: {} for length in sizes.lengths}
    for key, timing in interleaved(forms).items():
        name, length = key.split()
        measured[int(length)][name] = timing
    return measured


def _time_table(sizes: Sizes, measured: dict[int, dict[str, Timing]]) -> BenchTable:
    cells = []
    before: float | None = None
    for length, forms in measured.items():
        ours = forms["span"].fastest
        faster = times(forms["full"].fastest / ours) if "full" in forms else ""
        doubled = "" if before is None else times(ours / before)
        spreads = " / ".join(f"+{timing.spread:.0%}" for timing in forms.values())
        cells.append((f"{length}", times(ours / forms["window"].fastest), faster, doubled, spreads))
        before = ours
    header = ("tokens", "span / window", "full / span", "per doubling", "median over fastest")
    return BenchTable("time", header, cells)


def _memory_table(peaks: dict[int, dict[str, int]]) -> BenchTable:
    cells = [
        (f"{length}", f"{of['span'] / MIB:.0f}", f"{of['window'] / MIB:.0f}", times(of["span"] / of["window"]))
        for length, of in peaks.items()
    ]
    return BenchTable("peak memory", ("tokens", "span, MiB", "window, MiB", "span / window"), cells)


def _goals(measured: dict[int, dict[str, Timing]], peaks: dict[int, dict[str, int]]) -> list[Goal]:
    ours = {length: forms["span"].fastest for length, forms in measured.items()}
    doublings = [ours[2 * length] / ours[length] for length in ours if 2 * length in ours]
    to_window = ours[16384] / measured[16384]["window"].fastest
    memory = max(of["span"] / of["window"] for of in peaks.values())
    return [
        Goal.at_least("full / span at 16384 tokens", 4, measured[16384]["full"].fastest / ours[16384]),
        Goal.at_most("span / window at 16384 tokens", 1.15, to_window),
        Goal.at_most("time ratio per doubling, the worst", 2.2, max(doublings)),
        Goal.at_most("peak memory / window's, the worst", 1.2, memory),
    ]


def peak_memory(form: str, length: int, quick: bool) -> int:
    """Bytes that one pass adds to a fresh process."""
    call = f"probe({form!r}, {length}, {'QUICK' if quick else 'FULL'})"
    return in_fresh_process(f"from {__name__} import FULL, QUICK, probe; {call}")


def probe(form: str, length: int, sizes: Sizes) -> None:
    """The body of that process: a short pass first, so that what every first pass loads is not counted."""
    torch.set_num_threads(1)
    run = spanned(sizes) if form == "span" else windowed(sizes.chunk)
    Row(sizes.rows(), 4 * sizes.chunk, torch.device("cpu")).forward_backward(run)
    row = Row(sizes.rows(), length, torch.device("cpu"))
    before = resident(reset=True)
    row.forward_backward(run)
    print(max(resource.getpagesize(), resident(reset=False) - before))
