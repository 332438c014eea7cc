"""Sliding-window attention against full attention, and against torch's attention with a dense mask, over the length.

Full attention is the work that a window saves; the dense mask is the window as one gets it from torch alone on a CPU,
and computes every pair in order to throw most of them away. The pairs that a window needs, as a share of those of full
attention, are the floor of the ratio. On CUDA our form is what dispatch takes there, and the same peers are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.architecture.attention import visible_tokens
from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs, attention
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

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Sizes:
    """What is measured. Dense masks are tried up to `masked` tokens: beyond, they take minutes and gigabytes."""

    heads: int
    head_dim: int
    window: int
    lengths: tuple[int, ...]
    masked: int


FULL = Sizes(heads=4, head_dim=64, window=1024, lengths=(2048, 4096, 8192, 16384), masked=8192)
QUICK = Sizes(heads=2, head_dim=8, window=32, lengths=(64, 512), masked=64)


def windowed(window: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attention(AttentionInputs(q, k, v, window))


def full(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHK, k_BLHK, v_BLHK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def masked(length: int, window: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    mask = (distance >= 0) & (distance < window)

    def run(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHK, k_BLHK, v_BLHK))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return run


class Row:
    """Queries, keys and values of one row, and a pass of any form over them."""

    def __init__(self, sizes: Sizes, length: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(length)
        shape = (1, length, sizes.heads, sizes.head_dim)
        numbers = [torch.randn(shape, generator=generator).to(device) for _ in range(4)]
        self.grad_BLHK = numbers.pop()
        self.qkv = [tensor.requires_grad_() for tensor in numbers]

    def forward_backward(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The output and the three gradients."""
        y_BLHK = form(*self.qkv)
        return [y_BLHK.detach(), *torch.autograd.grad(y_BLHK, self.qkv, self.grad_BLHK)]


def bench(settings: BenchSettings) -> BenchReport:
    """The sweep over the length."""
    sizes, device = (QUICK if settings.quick else FULL), compute_device()
    measured = {length: _measure(sizes, length, device, settings) for length in sizes.lengths}
    cells = [_cells(sizes, length, timings) for length, timings in measured.items()]
    header = (
        "tokens",
        "window / full",
        "pairs needed / full",
        "window / dense mask",
        "window per token",
        "median over fastest",
    )
    first = measured[sizes.lengths[0]]["window"].fastest / sizes.lengths[0]
    cells = [(*row[:4], times(measured[int(row[0])]["window"].fastest / int(row[0]) / first), row[4]) for row in cells]
    notes = [
        f"batch 1, {sizes.heads} heads of {sizes.head_dim}, window {sizes.window}, fp32, forward and backward; full is "
        "torch's causal scaled_dot_product_attention, dense mask the same with a boolean L x L mask",
        f"{settings.repetitions} rounds of every form; window per token: our time per token over that of the first row",
        "outputs and gradients agree with those of the dense mask wherever that is measured",
    ]
    console = [f"{name} at {length}: {timing}" for length, forms in measured.items() for name, timing in forms.items()]
    goals = []
    if not settings.quick:
        largest = measured[16384]
        goals = [
            Goal.at_most(
                "window of 1024 / full at 16384 tokens", 0.25, largest["window"].fastest / largest["full"].fastest
            )
        ]
        ratios = [m["window"].fastest / m["mask"].fastest for m in measured.values() if "mask" in m]
        goals += [Goal.at_most("window / dense mask, at the worst length", 1.0, max(ratios))]
    return BenchReport(
        "Sliding-window attention", device.type, [BenchTable("time", header, cells)], goals, notes, console
    )


def _measure(sizes: Sizes, length: int, device: torch.device, settings: BenchSettings) -> dict[str, Timing]:
    row = Row(sizes, length, device)
    ours = windowed(sizes.window)
    forms = {"window": ours, "full": full}
    if length <= sizes.masked:
        forms["mask"] = masked(length, sizes.window, device)
        pairs = zip(row.forward_backward(ours), row.forward_backward(forms["mask"]), strict=True)
        difference = max((got - wanted).abs().max().item() for got, wanted in pairs)
        assert difference <= TOLERANCE, f"the window and the dense mask differ by {difference:.1e}"
    runs = {
        name: Contender(lambda form=form: row.forward_backward(form), settings.repetitions)
        for name, form in forms.items()
    }
    return interleaved(runs)


def _cells(sizes: Sizes, length: int, timings: dict[str, Timing]) -> tuple[str, ...]:
    ours = timings["window"].fastest
    needed = visible_tokens(length, sizes.window) / visible_tokens(length, None)
    mask = f"{ours / timings['mask'].fastest:.2f}" if "mask" in timings else ""
    spreads = " / ".join(f"+{timing.spread:.0%}" for timing in timings.values())
    return f"{length}", f"{ours / timings['full'].fastest:.3f}", f"{needed:.3f}", mask, spreads
