"""Kernels one by one: bytes and operations on paper, and on a GPU the time, side by side with other packages' kernels.

What bounds a kernel is either the memory or the multipliers, so beside its rates stand their shares of what the same
device reached in the same run with a large copy and a large bf16 product. Times are medians between CUDA events after
a warm-up; backward is timed alone, over a graph that is kept. Every form of an op that the device and its packages
allow is measured, fla's kernel for SSD too. Without CUDA the paper counts are all there is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.dispatch import Op
from hybridtron.ops.kernel_cost import (
    Cost,
    add_rms_norm_cost,
    causal_conv_cost,
    linear_cross_entropy_cost,
    rms_norm_cost,
    selective_scan_cost,
    ssd_cost,
)
from hybridtron.ops.loss import LinearCrossEntropyInputs, linear_cross_entropy
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.proving.measuring import BenchReport, BenchSettings, BenchTable

from .other_kernels import others
from .span import Sizes as SpanSizes
from .span import spanned

VALUE_BYTES = 2  # bf16
WARM_UP = 3
COPY_BYTES, PRODUCT_SIZE = 2**30, 8192
NOT_MEASURED = "not measured"
HEADER = ("kernel", "tokens", "pass", "GB", "TFLOP", "form", "ms", "GB/s", "of copy", "TFLOP/s", "of matmul")


@dataclass(frozen=True)
class Sizes:
    """Of a model: D width, E inner channels, N state; SSD's heads, head size, state; attention's; the vocabulary."""

    width: int = 2304
    inner: int = 4608
    state: int = 16
    conv: int = 4
    ssd: tuple[int, int, int] = (72, 64, 128)
    attention: tuple[int, int] = (18, 128)
    window: int = 2048
    block: int = 32
    blocks: int = 8
    vocabulary: int = 32000
    lengths: tuple[int, ...] = (2048, 8192, 32768, 65536)


FULL = Sizes()
QUICK = Sizes(8, 16, 4, 4, (2, 4, 4), (2, 8), 16, 4, 2, 32, (48,))


@dataclass(frozen=True)
class Kernel:
    """A kernel at one length: an op, or what is made of several, its inputs, and what it costs."""

    name: str
    run: Op[Any, Any] | Callable[[Any], Tensor]
    inputs: Callable[[torch.device], Any]
    forward: Cost
    backward: Cost
    outputs: int = field(default=1, kw_only=True)  # the number of them, from the first, that get gradients

    def implementations(self, device: torch.device, inputs: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Every implementation that can run these inputs here, by name."""
        if not isinstance(self.run, Op):
            yield "ours", self.run
            return
        for each in self.run.implementations:
            if each.unavailable_reason(device.type) is None and each.unsupported_reason(inputs) is None:
                yield each.name, each.function
        yield from others(self.run)


def normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers that want gradients; bf16, and fp32 on a CPU."""
    dtype = torch.float32 if device.type == "cpu" else dtype
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def kernels(sizes: Sizes, length: int) -> list[Kernel]:
    """All of them, for one row of this number of tokens."""
    return [
        scan_kernel(sizes, length), conv_kernel(sizes, length), ssd_kernel(sizes, length), norm_kernel(sizes, length),
        sum_norm_kernel(sizes, length), loss_kernel(sizes, length), window_kernel(sizes, length),
        span_kernel(sizes, length),
    ]  # fmt: skip


def scan_kernel(sizes: Sizes, length: int) -> Kernel:
    inner, state = sizes.inner, sizes.state

    def inputs(device: torch.device) -> ScanInputs:
        x, dt, z = (normal(device, 1, length, inner) for _ in range(3))
        A = -torch.rand(inner, state, device=device).requires_grad_()
        B, C = (normal(device, 1, length, state) for _ in range(2))
        D, bias = (normal(device, inner, dtype=torch.float32) for _ in range(2))
        return ScanInputs(x, dt, A, B, C, D, bias, z)

    costs = (selective_scan_cost(1, length, inner, state, VALUE_BYTES, True, backward) for backward in (False, True))
    return Kernel("selective scan", selective_scan, inputs, *costs)


def conv_kernel(sizes: Sizes, length: int) -> Kernel:
    def inputs(device: torch.device) -> ConvInputs:
        weights = normal(device, sizes.inner, sizes.conv), normal(device, sizes.inner)
        return ConvInputs(normal(device, 1, length, sizes.inner), *weights, activation=True)

    costs = (causal_conv_cost(1, length, sizes.inner, sizes.conv, VALUE_BYTES, backward) for backward in (False, True))
    return Kernel("causal conv", causal_conv, inputs, *costs)


def ssd_kernel(sizes: Sizes, length: int) -> Kernel:
    heads, head, state = sizes.ssd

    def inputs(device: torch.device) -> SSDInputs:
        x, dt = normal(device, 1, length, heads, head), normal(device, 1, length, heads)
        A = -torch.rand(heads, device=device).requires_grad_()
        B, C = (normal(device, 1, length, 1, state) for _ in range(2))
        D, bias = (normal(device, heads, dtype=torch.float32) for _ in range(2))
        return SSDInputs(x, dt, A, B, C, D, bias)

    costs = (ssd_cost(1, length, heads, head, 1, state, VALUE_BYTES, 128, backward) for backward in (False, True))
    return Kernel("SSD", ssd_scan, inputs, *costs)


def norm_kernel(sizes: Sizes, length: int) -> Kernel:
    def inputs(device: torch.device) -> RMSNormInputs:
        x, weight = normal(device, length, 1, sizes.width), normal(device, sizes.width, dtype=torch.float32)
        return RMSNormInputs(x, weight, 1e-5)

    costs = (rms_norm_cost(length, sizes.width, VALUE_BYTES, backward) for backward in (False, True))
    return Kernel("RMSNorm", rms_norm, inputs, *costs)


def sum_norm_kernel(sizes: Sizes, length: int) -> Kernel:
    """The same with the sum before it that makes the residual stream."""

    def inputs(device: torch.device) -> AddRMSNormInputs:
        x, added = (normal(device, length, 1, sizes.width) for _ in range(2))
        return AddRMSNormInputs(x, added, normal(device, sizes.width, dtype=torch.float32), 1e-5)

    costs = (add_rms_norm_cost(length, sizes.width, VALUE_BYTES, backward) for backward in (False, True))
    return Kernel("sum + RMSNorm", add_rms_norm, inputs, *costs, outputs=2)


def loss_kernel(sizes: Sizes, length: int) -> Kernel:
    """Forward makes the gradients too; backward scales them."""

    def inputs(device: torch.device) -> LinearCrossEntropyInputs:
        labels = torch.randint(sizes.vocabulary, (length,), device=device)
        mask = torch.ones(length, dtype=torch.bool, device=device)
        x, weight = normal(device, length, sizes.width), normal(device, sizes.vocabulary, sizes.width)
        return LinearCrossEntropyInputs(x, weight, labels, mask, 0.0)

    whole = linear_cross_entropy_cost(length, sizes.width, sizes.vocabulary, VALUE_BYTES, 1)
    scaled = (length + sizes.vocabulary) * sizes.width
    back = Cost(2 * VALUE_BYTES * scaled, scaled)
    return Kernel("linear + cross entropy", linear_cross_entropy, inputs, whole, back)


def attention_costs(sizes: Sizes, length: int, pairs: int) -> tuple[Cost, Cost]:
    """Two products of every visible pair forward and five backward; q, k, v, y and their gradients once."""
    heads, head = sizes.attention
    values = VALUE_BYTES * length * heads * head
    return Cost(4 * values, 4 * pairs * heads * head), Cost(8 * values, 10 * pairs * heads * head)


def window_kernel(sizes: Sizes, length: int) -> Kernel:
    def inputs(device: torch.device) -> AttentionInputs:
        q, k, v = (normal(device, 1, length, *sizes.attention) for _ in range(3))
        return AttentionInputs(q, k, v, sizes.window)

    reach = min(sizes.window, length)
    costs = attention_costs(sizes, length, reach * (reach + 1) // 2 + (length - reach) * reach)
    return Kernel(f"attention, window {sizes.window}", attention, inputs, *costs)


def span_kernel(sizes: Sizes, length: int) -> Kernel:
    """With summaries, relevance and choice, which the paper count leaves out: they are small beside the rest."""

    def inputs(device: torch.device) -> AttentionInputs:
        q, k, v = (normal(device, 1, length, *sizes.attention) for _ in range(3))
        return AttentionInputs(q, k, v)

    chunk = sizes.window
    chosen = sum(min(sizes.blocks, start // sizes.block) * sizes.block * chunk for start in range(0, length, chunk))
    costs = attention_costs(sizes, length, length * (chunk + 1) // 2 + chosen)
    run = spanned(SpanSizes(*sizes.attention, chunk, sizes.block, sizes.blocks, (length,), length, ()))
    name = f"SE-Attn, chunk {chunk}, {sizes.blocks} x {sizes.block}"
    return Kernel(name, lambda inputs: run(*inputs[:3]), inputs, *costs)


def milliseconds(run: Callable[[], object], repetitions: int) -> float:
    """The median of the times between two events around a call."""
    times = []
    for turn in range(WARM_UP + repetitions):
        start, end = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if turn >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings(device: torch.device, repetitions: int) -> tuple[float, float]:
    """Bytes a second of a large copy, and operations a second of a large bf16 product."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied = milliseconds(lambda: target.copy_(source), repetitions)
    multiplied = milliseconds(lambda: left @ right, repetitions)
    return 2 * COPY_BYTES / copied * 1e3, 2 * PRODUCT_SIZE**3 / multiplied * 1e3


def passes(run: Callable[[Any], Any], inputs: tuple[Any, ...], outputs: int) -> dict[str, Callable[[], object]]:
    """Forward, backward over a kept graph from the first outputs, and both."""
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        out = run(inputs)
        return out[:outputs] if isinstance(out, tuple) else (out,)

    kept = forward()
    gradients = [torch.ones_like(one) for one in kept]

    def backward(out: tuple[Tensor, ...]) -> object:
        return torch.autograd.grad(out, wanted, gradients, retain_graph=True)

    return {"forward": forward, "backward": lambda: backward(kept), "both": lambda: backward(forward())}


def cells_of(
    kernel: Kernel, length: int, device: torch.device, most: tuple[float, float], times: int
) -> list[tuple[str, ...]]:
    """A line for each pass, and on a GPU for each form."""
    costs = {"forward": kernel.forward, "backward": kernel.backward, "both": kernel.forward + kernel.backward}
    paper = {
        name: (kernel.name, f"{length}", name, f"{cost.bytes / 1e9:.3g}", f"{cost.flops / 1e12:.3g}")
        for name, cost in costs.items()
    }
    if device.type == "cpu":
        return [(*counted, *([NOT_MEASURED] * 6)) for counted in paper.values()]
    cells, inputs = [], kernel.inputs(device)
    for form, run in kernel.implementations(device, inputs):
        for name, one_pass in passes(run, inputs, kernel.outputs).items():
            taken = milliseconds(one_pass, times)
            rates = costs[name].bytes / taken * 1e3, costs[name].flops / taken * 1e3
            shares = [f"{rate / limit:.0%}" for rate, limit in zip(rates, most, strict=True)]
            measured = (f"{taken:.3f}", f"{rates[0] / 1e9:,.0f}", shares[0], f"{rates[1] / 1e12:.3g}", shares[1])
            cells.append((*paper[name], form, *measured))
    return cells


def bench(settings: BenchSettings) -> BenchReport:
    """All kernels at all lengths."""
    sizes, device = (QUICK if settings.quick else FULL), compute_device()
    notes = [
        f"one row, bf16 with fp32 parameters; width {sizes.width}, {sizes.inner} inner channels with states of "
        f"{sizes.state}, SSD heads, head size and state {sizes.ssd}, attention heads and head size {sizes.attention}, "
        f"vocabulary {sizes.vocabulary}",
        "GB and TFLOP are counted on paper (`hybridtron/ops/kernel_cost.py`), each tensor once for every time that "
        "our algorithm reads or writes it; rates of other forms are of the same count",
    ]
    most = (1.0, 1.0)
    if device.type == "cpu":
        notes.append(
            "nothing here was measured on a GPU: run this command on a machine with one, and it writes the same table "
            "with times, as `benchmarks/kernels_cuda.md`"
        )
    else:
        most = ceilings(device, settings.repetitions)
        notes.append(f"a copy of 1 GiB reached {most[0] / 1e9:,.0f} GB/s, a bf16 product {most[1] / 1e12:.0f} TFLOP/s")
    cells = [
        line
        for length in sizes.lengths
        for kernel in kernels(sizes, length)
        for line in cells_of(kernel, length, device, most, settings.repetitions)
    ]
    return BenchReport("Kernels", device.type, [BenchTable("by kernel and length", HEADER, cells)], [], notes)
