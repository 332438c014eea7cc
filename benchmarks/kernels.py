"""Kernels one by one: bytes and modelled time by a rehearsal, and on a GPU the measured time, beside other packages'
kernels.

A measured rate is given with its share of the rate of a large copy, taken on the same device in the same run; a time is
given with the model's (`hybridtron/rehearse`). Times are medians of blocks of calls by torch.utils.benchmark, after a
warm-up; backward is timed alone, over a graph that is kept. Every form of an op that the device and its packages allow
is measured, fla's kernel for SSD too. Without CUDA only the model's numbers are given.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.benchmark import Timer

from hybridtron.device import compute_device, describe_device
from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.dispatch import Op
from hybridtron.ops.loss import LinearCrossEntropyInputs, linear_cross_entropy
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import SSDInputs, ssd_scan
from hybridtron.planning.rates import GPUS
from hybridtron.proving.measuring import BenchReport
from hybridtron.rehearse.rehearsal import rehearse_calls
from hybridtron.rehearse.step_time import Work

from .attention import spanned
from .peak_memory import fresh_processes

COPY_BYTES = 2**30
HEADER = ("kernel", "tokens", "form", "pass", "launches", "GB", "ms by the model")
Call = tuple[str, int, str, str]  # kernel, tokens, form, pass
MEASURED = ("ms", "model / measured", "GB/s", "of copy")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    width (D), inner channels (E) and state (N); SSD's heads, head size and state; attention's heads and head size; the
    vocabulary; row lengths.
    """

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
    """A kernel at one length, with its inputs: an op, or a function that combines several."""

    name: str
    run: Op[Any, Any] | Callable[[Any], Tensor]
    inputs: Any
    outputs: int = 1  # number of outputs with gradients, counted from the first
    repeats: bool = True  # whether backward leaves the kept tensors unchanged

    def implementations(self, device: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Yield every implementation that can run these inputs on a device, by name, and other ways to compute them."""
        if not isinstance(self.run, Op):
            yield "ours", self.run
            return
        for implementation in self.run.implementations:
            if (
                implementation.unavailable_reason(device) is None
                and implementation.unsupported_reason(self.inputs) is None
            ):
                yield implementation.name, implementation.function
        if self.run is rms_norm:
            yield "torch", torch_norm
        if self.run is add_rms_norm:
            yield "one by one", add_rms_norm.reference.function
            yield "torch", torch_add_norm
        if self.run is ssd_scan and torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
            yield "fla", fla_ssd


def torch_norm(inputs: RMSNormInputs) -> Tensor:
    x, weight, eps = inputs
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def torch_add_norm(inputs: AddRMSNormInputs) -> tuple[Tensor, Tensor]:
    summed = inputs.x + inputs.added
    return summed, torch_norm(RMSNormInputs(summed, inputs.weight, inputs.eps))


def fla_ssd(inputs: SSDInputs) -> Tensor:
    """Compute SSD as fla's gated linear attention with one decay for each head.

    Its heads do not share B and C, so these are repeated.
    """
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    x, dt, A, B, C, D, bias, _, _ = inputs
    delta = step_sizes(dt, bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], dim=2) for t in (B, C))
    v = (x * delta.unsqueeze(3)).to(x.dtype)
    return chunk_simple_gla(C, B, v, delta * A, scale=1.0)[0] + D.to(x.dtype)[:, None] * x


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers with gradients enabled; on a CPU always in fp32."""
    dtype = torch.float32 if torch.get_default_device().type == "cpu" else dtype
    return torch.randn(shape, dtype=dtype).requires_grad_()


def scan_kernel(sizes: Sizes, length: int) -> Kernel:
    inner = sizes.inner
    state = sizes.state
    x, dt, z = (normal(1, length, inner) for _ in range(3))
    A = -torch.rand(inner, state).requires_grad_()
    B, C = (normal(1, length, state) for _ in range(2))
    D, bias = (normal(inner, dtype=torch.float32) for _ in range(2))
    return Kernel("selective scan", selective_scan, ScanInputs(x, dt, A, B, C, D, bias, z))


def conv_kernel(sizes: Sizes, length: int) -> Kernel:
    weight = normal(sizes.inner, sizes.conv)
    bias = normal(sizes.inner)
    inputs = ConvInputs(normal(1, length, sizes.inner), weight, bias, activation=True)
    return Kernel("causal conv", causal_conv, inputs)


def ssd_kernel(sizes: Sizes, length: int) -> Kernel:
    heads, head, state = sizes.ssd
    x = normal(1, length, heads, head)
    dt = normal(1, length, heads)
    A = -torch.rand(heads).requires_grad_()
    B, C = (normal(1, length, 1, state) for _ in range(2))
    D, bias = (normal(heads, dtype=torch.float32) for _ in range(2))
    return Kernel("SSD", ssd_scan, SSDInputs(x, dt, A, B, C, D, bias))


def norm_kernel(sizes: Sizes, length: int) -> Kernel:
    inputs = RMSNormInputs(normal(length, 1, sizes.width), normal(sizes.width, dtype=torch.float32), 1e-5)
    return Kernel("RMSNorm", rms_norm, inputs)


def sum_norm_kernel(sizes: Sizes, length: int) -> Kernel:
    """Return the kernel that adds to the residual stream and normalises the sum."""
    x, added = (normal(length, 1, sizes.width) for _ in range(2))
    inputs = AddRMSNormInputs(x, added, normal(sizes.width, dtype=torch.float32), 1e-5)
    return Kernel("sum + RMSNorm", add_rms_norm, inputs, outputs=2)


def loss_kernel(sizes: Sizes, length: int) -> Kernel:
    """Return the loss kernel, whose forward also computes the gradients; backward only scales them."""
    labels = torch.randint(sizes.vocabulary, (length,))
    mask = torch.ones(length, dtype=torch.bool)
    x = normal(length, sizes.width)
    weight = normal(sizes.vocabulary, sizes.width)
    inputs = LinearCrossEntropyInputs(x, weight, labels, mask, 0.0)
    return Kernel("linear + cross entropy", linear_cross_entropy, inputs, repeats=False)


def window_kernel(sizes: Sizes, length: int) -> Kernel:
    q, k, v = (normal(1, length, *sizes.attention) for _ in range(3))
    return Kernel(f"attention, window {sizes.window}", attention, AttentionInputs(q, k, v, sizes.window))


def full_kernel(sizes: Sizes, length: int) -> Kernel:
    q, k, v = (normal(1, length, *sizes.attention) for _ in range(3))
    return Kernel("attention, full", attention, AttentionInputs(q, k, v))


def span_kernel(sizes: Sizes, length: int) -> Kernel:
    """Return span attention with summaries, relevance and choice."""
    q, k, v = (normal(1, length, *sizes.attention) for _ in range(3))
    run = spanned(sizes.window, sizes.block, sizes.blocks)
    name = f"SE-Attn, chunk {sizes.window}, {sizes.blocks} x {sizes.block}"
    return Kernel(name, lambda inputs: run(*inputs), (q, k, v))


KERNELS = (
    scan_kernel,
    conv_kernel,
    ssd_kernel,
    norm_kernel,
    sum_norm_kernel,
    loss_kernel,
    window_kernel,
    full_kernel,
    span_kernel,
)
"""Functions that make a kernel for one row of a length, with inputs on torch's default device."""


def seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call; torch's timer waits for the device."""
    return Timer("run()", globals={"run": run}).blocked_autorange().median


def copy_rate(device: torch.device) -> float:
    """Return the bytes per second of a large copy, counting reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def passes(kernel: Kernel, run: Callable[[Any], Any]) -> dict[str, Callable[[], object]]:
    """Return the passes of a kernel by name: forward, backward over a kept graph, and both.

    Backward is left out if it cannot be repeated.
    """
    inputs = kernel.inputs
    outputs = kernel.outputs
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        out = run(inputs)
        if isinstance(out, tuple):
            return out[:outputs]
        return (out,)

    kept = forward()
    gradients = [torch.ones_like(output) for output in kept]

    def backward(out: tuple[Tensor, ...]) -> object:
        return torch.autograd.grad(out, wanted, gradients, retain_graph=True)

    alone: dict[str, Callable[[], object]] = {"forward": forward}
    if kernel.repeats:
        alone["backward"] = lambda: backward(kept)
    return {**alone, "both": lambda: backward(forward())}


def calls(sizes: Sizes, device: torch.device, forms: int | None = None) -> Iterator[tuple[Call, Callable[[], object]]]:
    """Yield every pass of every kernel in all its forms, or in its first `forms` ones."""
    for length in sizes.lengths:
        for make in KERNELS:
            with device:
                kernel = make(sizes, length)
            for form, run in islice(kernel.implementations(device.type), forms):
                for name, one_pass in passes(kernel, run).items():
                    yield (kernel.name, length, form, name), one_pass


def rehearsed(quick: bool) -> Iterator[tuple[Call, Callable[[], object]]]:
    """Yield the calls of a simulated GPU, in the forms that it would run."""
    return calls(QUICK if quick else FULL, torch.device("cuda"), forms=1)


def model_cells(model: Work | None) -> tuple[str, ...]:
    """Return cells with launches, bytes and time by the rehearsal; empty ones without a rehearsal."""
    if model is None:
        return "", "", ""
    return f"{model.launches:.0f}", f"{model.bytes / 1e9:.3g}", f"{model.seconds * 1e3:.3f}"


def measured_cells(model: Work | None, measured: float, copied: float) -> tuple[str, ...]:
    """Return cells with the time, the model's share of it, and the rate, absolute and over a copy's."""
    milliseconds = f"{measured * 1e3:.3f}"
    if model is None:
        return milliseconds, "", "", ""
    rate = model.bytes / measured
    return milliseconds, f"{model.seconds / measured:.0%}", f"{rate / 1e9:,.0f}", f"{rate / copied:.0%}"


def kernels(report: BenchReport) -> None:
    """Measure all kernels at all lengths, or without a GPU list the model's numbers."""
    sizes = report.pick(full=FULL, quick=QUICK)
    device = compute_device()
    report.device = device.type
    gpu = next((name for name in GPUS if name in describe_device().lower()), "h100")
    with fresh_processes() as pool:  # this process may have a real GPU
        models = pool.submit(rehearse_calls, gpu, f"{__name__}:{rehearsed.__name__}", report.quick).result()
    report.notes += [
        f"one row, bf16 with fp32 parameters; width {sizes.width}, {sizes.inner} inner channels with states of "
        f"{sizes.state}, SSD heads, head size and state {sizes.ssd}, attention heads and head size {sizes.attention}, "
        f"vocabulary {sizes.vocabulary}",
        f"launches, GB and ms by the model are those of a rehearsal on {gpu.upper()}, not measured; times are floors",
    ]
    if device.type == "cpu":
        report.notes.append("on a machine with a GPU this command writes the same table with times: `kernels_cuda.md`")
        header = HEADER
        cells = [(*map(str, call), *model_cells(model)) for call, model in models.items()]
    else:
        copied = copy_rate(device)
        header = (*HEADER, *MEASURED)
        cells = []
        report.notes.append(f"a copy of 1 GiB reached {copied / 1e9:,.0f} GB/s")
        for call, one_pass in calls(sizes, device):
            model = models.get(call)
            cells.append((*map(str, call), *model_cells(model), *measured_cells(model, seconds(one_pass), copied)))
    report.table("by kernel and length", header, cells)
