"""Attention over the length: a sliding window, and span-expanded attention, each against full attention.

Full attention is the work that both save. `attention` also measures torch's attention with a dense mask. That is the
window as torch alone offers it on a CPU; it computes every pair and discards most of them. The pairs of a window, as a
share of full attention's, are the floor of the ratio. On CUDA our form is the one that dispatch selects there, and the
peers are again torch's.

In `span`, a query sees the tokens before it in its chunk of 256, half of them on average, and 256 tokens of the past:
one and a half times the pairs of a window of 256. This ratio is the floor; any time beyond it is the cost of summaries,
choice and gathering. Queries, keys and values are random, so the chosen blocks lie anywhere, the worst case for a
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.architecture.attention import visible_tokens
from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs
from hybridtron.ops.attention import attention as windowed_attention
from hybridtron.ops.dispatch import force
from hybridtron.ops.span import (
    CarriedBlocks,
    ChoiceRule,
    SpanCut,
    SpanInputs,
    SpanSegment,
    Whole,
    choose_by_relevance,
    known_of,
    span_attention,
)
from hybridtron.proving.measuring import BenchReport, difference, per_token, times

from .peak_memory import measure_memory

Form = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured rows; a chunk is as long as a window.

    The slowest form is measured up to `most` tokens.
    """

    heads: int
    head_dim: int
    window: int
    lengths: tuple[int, ...]
    most: int
    block: int = 0
    blocks: int = 0
    memory: tuple[int, ...] = ()


WINDOW = Sizes(heads=4, head_dim=64, window=1024, lengths=(2048, 4096, 8192, 16384), most=8192)
SPAN = Sizes(4, 64, 256, (4096, 8192, 16384, 32768), 16384, 32, 8, memory=(16384, 32768))
TINY_WINDOW = Sizes(heads=2, head_dim=8, window=32, lengths=(64, 512), most=64)
TINY_SPAN = Sizes(2, 8, 32, (64, 256), 256, 8, 4, memory=(256,))


def windowed(window: int) -> Form:
    return lambda q, k, v: windowed_attention(AttentionInputs(q, k, v, window))


def full(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHK, k_BLHK, v_BLHK))
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).transpose(1, 2)


def masked(length: int, window: int) -> Form:
    positions = torch.arange(length, device=compute_device())
    distance = positions[:, None] - positions
    return partial(full, mask=(distance >= 0) & (distance < window))


def spanned(chunk: int, block: int, blocks: int) -> Form:
    """Return span-expanded attention with all its parts: summaries, relevance, choice, attention."""
    rule = ChoiceRule(blocks, previous=False)

    def run(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        batch, length = q_BLHK.shape[:2]
        cut = SpanCut(chunk, block, (SpanSegment(slice(0, batch), 0, length),))
        carried = CarriedBlocks(chunk // block, 2 * chunk // block)
        rows = Whole(q_BLHK.shape[1], k_BLHK.shape[2], partial(known_of, cut, rule, (q_BLHK, k_BLHK, v_BLHK), None))
        chosen, _ = choose_by_relevance(cut, rule, rows, carried)
        return span_attention(SpanInputs(q_BLHK, k_BLHK, v_BLHK, cut, chosen))

    return run


class Row:
    """Random queries, keys and values for one row, and any form's forward and backward pass on them."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        shape = (1, length, sizes.heads, sizes.head_dim)
        numbers = [torch.randn(shape, generator=generator).to(compute_device()) for _ in range(4)]
        self.grad_BLHK = numbers.pop()
        self.qkv = [tensor.requires_grad_() for tensor in numbers]

    def forward_backward(self, form: Form) -> list[Tensor]:
        """Return the output and the three gradients."""
        y_BLHK = form(*self.qkv)
        return [y_BLHK.detach(), *torch.autograd.grad(y_BLHK, self.qkv, self.grad_BLHK)]

    def passes(self, forms: Mapping[str, Form]) -> dict[str, Callable[[], object]]:
        return {name: partial(self.forward_backward, form) for name, form in forms.items()}


def attention(report: BenchReport) -> None:
    """Measure a window over the length, against full attention and a dense mask."""
    sizes = report.pick(full=WINDOW, quick=TINY_WINDOW)
    report.device = compute_device().type
    ours = windowed(sizes.window)
    passes = {}
    for length in sizes.lengths:
        row = Row(sizes, length)
        forms = {"window": ours, "full": full}
        if length <= sizes.most:
            forms["dense mask"] = masked(length, sizes.window)
            difference(row.forward_backward(ours), row.forward_backward(forms["dense mask"]))
        passes[length] = row.passes(forms)
    measured = report.sweep(passes)
    needed = [visible_tokens(length, sizes.window) / visible_tokens(length, None) for length in measured]
    more = {"pairs needed / full": [f"{share:.3f}" for share in needed]}
    more["window per token"] = per_token(measured, "window")
    report.ratios("time", "tokens", measured, [("window", "full"), ("window", "dense mask")], more)
    report.notes += [
        f"batch 1, {sizes.heads} heads of {sizes.head_dim}, window {sizes.window}, fp32, forward and backward; full is "
        "torch's causal scaled_dot_product_attention, dense mask the same with a boolean L x L mask",
        f"{report.repetitions} rounds of every form; window per token: our time per token over that of the first row",
        "outputs and gradients agree with those of the dense mask wherever that is measured",
    ]
    last = sizes.lengths[-1]
    dense = [timings for length, timings in measured.items() if length <= sizes.most]
    report.at_most(f"window of {sizes.window} / full at {last} tokens", 0.15, measured[last].ratio("window", "full"))
    worst = max(timings.ratio("window", "dense mask") for timings in dense)
    report.at_most("window / dense mask, at the worst length", 1.0, worst)


def span(report: BenchReport) -> None:
    """Measure spans over the length, and their peak memory."""
    sizes = report.pick(full=SPAN, quick=TINY_SPAN)
    report.device = compute_device().type
    forms = span_forms(sizes)
    row = Row(sizes, 4 * sizes.window)
    ours = row.forward_backward(forms["span"])
    with force(span_attention="reference"):
        difference(ours, row.forward_backward(forms["span"]))
    passes = {}
    for length in sizes.lengths:
        timed: dict[str, Form] = {**forms}
        if length <= sizes.most:
            timed["full"] = full
        passes[length] = Row(sizes, length).passes(timed)
    measured = report.sweep(passes)
    pairs = [span_pairs(length, sizes) / visible_tokens(length, sizes.window) for length in measured]
    more = {"pairs, span / window": [times(ratio) for ratio in pairs], "span per token": per_token(measured, "span")}
    report.ratios("time", "tokens", measured, [("span", "window"), ("full", "span")], more)
    peaks = measure_memory(report, prepared, sizes.memory, ("span", "window"), sizes)
    report.notes += [
        f"batch 1, {sizes.heads} heads of {sizes.head_dim}, fp32, forward and backward; chunks and window of "
        f"{sizes.window} tokens, {sizes.blocks} blocks of {sizes.block} tokens retrieved; full is torch's causal "
        "scaled_dot_product_attention",
        f"{report.repetitions} rounds of all forms and lengths; span per token: our time per token over that of the "
        "first row; outputs and gradients agree with the reference's",
    ]
    seconds = {length: timings["span"].fastest for length, timings in measured.items()}
    doublings = [seconds[2 * length] / seconds[length] for length in seconds if 2 * length in seconds]
    report.at_least(f"full / span at {sizes.most} tokens", 4, measured[sizes.most].ratio("full", "span"))
    over = measured[sizes.most].ratio("span", "window")
    report.at_most(f"span / window at {sizes.most} tokens", 1.15, over)
    report.at_most("the same, for each pair that is seen", 1.15, over / pairs[list(measured).index(sizes.most)])
    report.at_most("time ratio per doubling, the worst", 2.2, max(doublings, default=0.0))
    report.at_most("peak memory / window's, the worst", 1.2, max(of["span"] / of["window"] for of in peaks.values()))


def span_pairs(length: int, sizes: Sizes) -> float:
    """Return the mean number of keys that a token sees: earlier ones of its chunk, and retrieved blocks."""
    chunk = sizes.window
    most = sizes.block * sizes.blocks
    past = [min(most, start) for start in range(0, length, chunk)]
    return visible_tokens(chunk, None) + sum(past) / len(past)


def span_forms(sizes: Sizes) -> dict[str, Form]:
    return {"span": spanned(sizes.window, sizes.block, sizes.blocks), "window": windowed(sizes.window)}


def prepared(form: str, length: int, sizes: Sizes) -> Callable[[], object]:
    run = span_forms(sizes)[form]
    Row(sizes, 4 * sizes.window).forward_backward(run)
    return partial(Row(sizes, length).forward_backward, run)
