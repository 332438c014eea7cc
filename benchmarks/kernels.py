"""Kernels one by one: bytes and operations on paper, and on a GPU the time, side by side with other packages' kernels.

What bounds a kernel is either the memory or the multipliers, so beside its rates stand their shares of what the same
device reached in the same run with a large copy and a large bf16 product. Times are medians of blocks of calls by
torch.utils.benchmark, after a warm-up; backward is timed alone, over a graph that is kept. Every form of an op that the
device and its packages allow is measured, fla's kernel for SSD too. Without CUDA the paper counts are all there is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

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
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.proving.measuring import BenchReport

from .attention import spanned

VALUE_BYTES = 2  # bf16
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
    """A kernel at one length: an op, or what is made of several, its inputs, and its cost forward and backward."""

    name: str
    run: Op[Any, Any] | Callable[[Any], Tensor]
    inputs: Any
    cost: Callable[[bool], Cost]
    outputs: int = 1  # the number of them, from the first, that get gradients

    def implementations(self, device: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Every implementation that can run these inputs here, by name; and other packages' kernels."""
        if not isinstance(self.run, Op):
            yield "ours", self.run
            return
        for each in self.run.implementations:
            if each.unavailable_reason(device) is None and each.unsupported_reason(self.inputs) is None:
                yield each.name, each.function
        if self.run is rms_norm:
            yield "torch", torch_norm
        if self.run is add_rms_norm:
            yield "one by one", add_rms_norm.reference.function
            yield "torch", torch_add_norm
        if self.run is ssd_scan and importlib.util.find_spec("fla") is not None:
            yield "fla", fla_ssd


def torch_norm(inputs: RMSNormInputs) -> Tensor:
    x, weight, eps = inputs
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def torch_add_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    summed = inputs.x + inputs.added
    return summed, torch_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))


def fla_ssd(inputs: SSDInputs) -> Tensor:
    """The same recurrence as fla's gated linear attention with one decay a head; its heads do not share B and C."""
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    x, dt, A, B, C, D, bias, _, _ = inputs
    delta = step_sizes(dt, bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    v = (x * delta.unsqueeze(3)).to(x.dtype)
    return chunk_simple_gla(C, B, v, delta * A, scale=1.0)[0] + D.to(x.dtype)[:, None] * x


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers that want gradients; bf16, and fp32 on a CPU."""
    dtype = torch.float32 if torch.get_default_device().type == "cpu" else dtype
    return torch.randn(shape, dtype=dtype).requires_grad_()


def scan_kernel(sizes: Sizes, length: int) -> Kernel:
    inner, state = sizes.inner, sizes.state
    x, dt, z = (normal(1, length, inner) for _ in range(3))
    A = -torch.rand(inner, state).requires_grad_()
    B, C = (normal(1, length, state) for _ in range(2))
    D, bias = (normal(inner, dtype=torch.float32) for _ in range(2))
    cost = partial(selective_scan_cost, 1, length, inner, state, VALUE_BYTES, True)
    return Kernel("selective scan", selective_scan, ScanInputs(x, dt, A, B, C, D, bias, z), cost)


def conv_kernel(sizes: Sizes, length: int) -> Kernel:
    weights = normal(sizes.inner, sizes.conv), normal(sizes.inner)
    inputs = ConvInputs(normal(1, length, sizes.inner), *weights, activation=True)
    cost = partial(causal_conv_cost, 1, length, sizes.inner, sizes.conv, VALUE_BYTES)
    return Kernel("causal conv", causal_conv, inputs, cost)


def ssd_kernel(sizes: Sizes, length: int) -> Kernel:
    heads, head, state = sizes.ssd
    x, dt = normal(1, length, heads, head), normal(1, length, heads)
    A = -torch.rand(heads).requires_grad_()
    B, C = (normal(1, length, 1, state) for _ in range(2))
    D, bias = (normal(heads, dtype=torch.float32) for _ in range(2))
    cost = partial(ssd_cost, 1, length, heads, head, 1, state, VALUE_BYTES, 128)
    return Kernel("SSD", ssd_scan, SSDInputs(x, dt, A, B, C, D, bias), cost)


def norm_kernel(sizes: Sizes, length: int) -> Kernel:
    inputs = RMSNormInputs(normal(length, 1, sizes.width), normal(sizes.width, dtype=torch.float32), 1e-5)
    return Kernel("RMSNorm", rms_norm, inputs, partial(rms_norm_cost, length, sizes.width, VALUE_BYTES))


def sum_norm_kernel(sizes: Sizes, length: int) -> Kernel:
    """The same with the sum before it that makes the residual stream."""
    x, added = (normal(length, 1, sizes.width) for _ in range(2))
    inputs = AddRMSNormInputs(x, added, normal(sizes.width, dtype=torch.float32), 1e-5)
    cost = partial(add_rms_norm_cost, length, sizes.width, VALUE_BYTES)
    return Kernel("sum + RMSNorm", add_rms_norm, inputs, cost, outputs=2)


def loss_kernel(sizes: Sizes, length: int) -> Kernel:
    """Forward makes the gradients too; backward scales them."""
    labels, mask = torch.randint(sizes.vocabulary, (length,)), torch.ones(length, dtype=torch.bool)
    x, weight = normal(length, sizes.width), normal(sizes.vocabulary, sizes.width)
    scaled = (length + sizes.vocabulary) * sizes.width

    def cost(backward: bool) -> Cost:
        if backward:
            return Cost(2 * VALUE_BYTES * scaled, scaled)
        return linear_cross_entropy_cost(length, sizes.width, sizes.vocabulary, VALUE_BYTES, 1)

    inputs = LinearCrossEntropyInputs(x, weight, labels, mask, 0.0)
    return Kernel("linear + cross entropy", linear_cross_entropy, inputs, cost)


def attention_cost(sizes: Sizes, length: int, pairs: int, backward: bool) -> Cost:
    """Two products of every visible pair forward and five backward; q, k, v, y and their gradients once."""
    heads, head = sizes.attention
    values, products = (8, 10) if backward else (4, 4)
    return Cost(values * VALUE_BYTES * length * heads * head, products * pairs * heads * head)


def window_kernel(sizes: Sizes, length: int) -> Kernel:
    q, k, v = (normal(1, length, *sizes.attention) for _ in range(3))
    reach = min(sizes.window, length)
    cost = partial(attention_cost, sizes, length, reach * (reach + 1) // 2 + (length - reach) * reach)
    return Kernel(f"attention, window {sizes.window}", attention, AttentionInputs(q, k, v, sizes.window), cost)


def span_kernel(sizes: Sizes, length: int) -> Kernel:
    """With summaries, relevance and choice, which the paper count leaves out: they are small beside the rest."""
    q, k, v = (normal(1, length, *sizes.attention) for _ in range(3))
    chunk, run = sizes.window, spanned(sizes.window, sizes.block, sizes.blocks)
    chosen = sum(min(sizes.blocks, start // sizes.block) * sizes.block * chunk for start in range(0, length, chunk))
    cost = partial(attention_cost, sizes, length, length * (chunk + 1) // 2 + chosen)
    name = f"SE-Attn, chunk {chunk}, {sizes.blocks} x {sizes.block}"
    return Kernel(name, lambda inputs: run(*inputs), (q, k, v), cost)


KERNELS = (
    scan_kernel,
    conv_kernel,
    ssd_kernel,
    norm_kernel,
    sum_norm_kernel,
    loss_kernel,
    window_kernel,
    span_kernel,
)
"""Each for one row of a number of tokens, its inputs on torch's default device."""


def seconds(run: Callable[[], object]) -> float:
    """The median of the times of a call; torch waits for the device."""
    return Timer("run()", globals={"run": run}).blocked_autorange().median


def ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes a second of a large copy, and operations a second of a large bf16 product."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    copied, multiplied = seconds(lambda: target.copy_(source)), seconds(lambda: left @ right)
    return 2 * COPY_BYTES / copied, 2 * PRODUCT_SIZE**3 / multiplied


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


def cells_of(kernel: Kernel, length: int, most: tuple[float, float] | None) -> Iterator[tuple[str, ...]]:
    """A line for each pass, and on a GPU for each form."""
    forward, backward = kernel.cost(False), kernel.cost(True)
    costs = {"forward": forward, "backward": backward, "both": forward + backward}
    paper = {
        name: (kernel.name, f"{length}", name, f"{cost.bytes / 1e9:.3g}", f"{cost.flops / 1e12:.3g}")
        for name, cost in costs.items()
    }
    if most is None:
        yield from ((*counted, *([NOT_MEASURED] * 6)) for counted in paper.values())
        return
    for form, run in kernel.implementations("cuda"):
        for name, one_pass in passes(run, kernel.inputs, kernel.outputs).items():
            taken = seconds(one_pass)
            rates = costs[name].bytes / taken, costs[name].flops / taken
            shares = [f"{rate / limit:.0%}" for rate, limit in zip(rates, most, strict=True)]
            measured = (f"{taken * 1e3:.3f}", f"{rates[0] / 1e9:,.0f}", shares[0], f"{rates[1] / 1e12:.3g}", shares[1])
            yield *paper[name], form, *measured


def kernels(report: BenchReport) -> None:
    """All kernels at all lengths."""
    sizes, device = QUICK if report.quick else FULL, compute_device()
    report.device, most = device.type, None
    report.notes += [
        f"one row, bf16 with fp32 parameters; width {sizes.width}, {sizes.inner} inner channels with states of "
        f"{sizes.state}, SSD heads, head size and state {sizes.ssd}, attention heads and head size {sizes.attention}, "
        f"vocabulary {sizes.vocabulary}",
        "GB and TFLOP are counted on paper (`hybridtron/ops/kernel_cost.py`), each tensor once for every time that "
        "our algorithm reads or writes it; rates of other forms are of the same count",
    ]
    if device.type == "cpu":
        device = torch.device("meta")  # what is only counted holds no memory
        report.notes.append(
            "nothing here was measured on a GPU: run this command on a machine with one, and it writes the same table "
            "with times, as `benchmarks/kernels_cuda.md`"
        )
    else:
        most = ceilings(device)
        report.notes.append(
            f"a copy of 1 GiB reached {most[0] / 1e9:,.0f} GB/s, a bf16 product {most[1] / 1e12:.0f} TFLOP/s"
        )
    cells: list[tuple[str, ...]] = []
    for length in sizes.lengths:
        for make in KERNELS:
            with device:
                kernel = make(sizes, length)
            cells += cells_of(kernel, length, most)
    report.table("by kernel and length", HEADER, cells)
