"""The selective scan alone: its compiled form, against our forms in torch and transformers' loop, and against a floor.

The floor is the work that every form must do: read the inputs and write the outputs once forward, read them and the
output's gradient and write the inputs' gradients once backward, and form the L x E x N decays exp(delta A). It is timed
in the same rounds: a copy of that many bytes, and torch's exp over that many values in a buffer that stays in the
cache. The compiled form computes every decay twice, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from hybridtron.ops.dispatch import force
from hybridtron.ops.scan import ScanInputs, selective_scan
from hybridtron.proving.measuring import BenchReport, difference

from .peak_memory import measure_memory

CACHED = 2**16  # values of the buffer over which the exp floor is measured
FORMS = ("native", "chunked", "reference", "transformers")


@dataclass(frozen=True)
class Sizes:
    """E channels, N state entries, and row lengths. The loops are measured up to `most` tokens."""

    channels: int
    state: int
    lengths: tuple[int, ...]
    most: int
    memory: tuple[int, ...]


FULL = Sizes(channels=512, state=16, lengths=(256, 512, 1024, 4096), most=512, memory=(512, 1024))
QUICK = Sizes(channels=64, state=16, lengths=(16, 32, 64), most=32, memory=(192,))


def inputs(length: int, sizes: Sizes) -> list[Tensor]:
    """Return x, dt, A, B, C, D, z, dt_bias of one row, with ranges as in a trained mixer and gradients enabled."""
    generator = torch.Generator().manual_seed(length)
    channels = sizes.channels
    state = sizes.state

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    A_EN = -torch.arange(1.0, state + 1).repeat(channels, 1)
    x_BLE, dt_BLE, z_BLE = (normal(1, length, channels) for _ in range(3))
    B_BLN, C_BLN = (normal(1, length, state) for _ in range(2))
    tensors = [x_BLE, 0.1 * dt_BLE, A_EN, B_BLN, C_BLN, normal(channels), z_BLE, normal(channels) - 4]
    return [tensor.requires_grad_() for tensor in tensors]


def run(form: str, tensors: list[Tensor]) -> Tensor:
    x, dt, A_EN, B, C, D_E, z, dt_bias_E = tensors
    if form == "transformers":  # its axis of tokens is the last
        x, dt, B, C, z = (tensor.transpose(1, 2) for tensor in (x, dt, B, C, z))
        return mamba_selective_scan(x, dt, A_EN, B, C, D_E, z, dt_bias_E, delta_softplus=True).transpose(1, 2)
    with force(selective_scan=form):
        return selective_scan(ScanInputs(x, dt, A_EN, B, C, D_E, dt_bias_E, z))[0]


def forward_backward(form: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and every input's gradient."""
    y_BLE = run(form, tensors)
    return [y_BLE.detach(), *torch.autograd.grad(y_BLE.square().mean(), tensors)]


def floor_bytes(sizes: Sizes) -> int:
    """Return the floor's fp32 bytes per token.

    Forward: x, dt, z, B, C -> y. Backward: the forward's inputs and dy -> dx, ddt, dz, dB, dC.
    """
    forward = 4 * sizes.channels + 2 * sizes.state
    backward = 7 * sizes.channels + 4 * sizes.state
    return 4 * (forward + backward)


def copy_floor(sizes: Sizes, length: int) -> Callable[[], object]:
    """Return a copy that moves as many bytes as the floor of a row; a copy of n bytes moves 2 n."""
    source = torch.ones(length * floor_bytes(sizes) // 8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def exp_floor(sizes: Sizes, length: int) -> Callable[[], object]:
    buffer = -torch.rand(CACHED)
    out = torch.empty_like(buffer)
    pieces = max(1, length * sizes.channels * sizes.state // CACHED)
    return lambda: [torch.exp(buffer, out=out) for _ in range(pieces)]


def scan(report: BenchReport) -> None:
    """Measure times, their ratio to the floor, and peak memory."""
    sizes = report.pick(full=FULL, quick=QUICK)
    shortest = inputs(sizes.lengths[0], sizes)
    for form in FORMS[:3]:
        difference(forward_backward(form, shortest), forward_backward("transformers", shortest))
    passes: dict[int, dict[str, Callable[[], object]]] = {}
    for length in sizes.lengths:
        tensors = inputs(length, sizes)
        forms = FORMS
        if length > sizes.most:
            forms = FORMS[:2]
        passes[length] = {form: partial(forward_backward, form, tensors) for form in forms}
        passes[length] |= {"copy floor": copy_floor(sizes, length), "exp floor": exp_floor(sizes, length)}
    pairs = [(form, "native") for form in FORMS[1:]] + [("native", floor) for floor in ("copy floor", "exp floor")]
    timings = report.sweep(passes)
    report.ratios("time", "tokens", timings, pairs, {})
    report.at_most("native / exp floor at the first length", 10, timings[sizes.lengths[0]].ratio("native", "exp floor"))
    report.at_most("native / exp floor at the last length", 12, timings[sizes.lengths[-1]].ratio("native", "exp floor"))
    per_token = 3 * 7 * sizes.channels * sizes.state
    report.notes += [
        f"batch 1, {sizes.channels} channels, state {sizes.state}, fp32, forward and backward, gradients of all inputs",
        f"floor per token: {floor_bytes(sizes):,} bytes moved, {per_token:,} FLOPs (3 x 7 x channels x state), "
        f"{sizes.channels * sizes.state:,} exponentials",
        f"outputs and gradients of all forms agree; {report.repetitions} rounds",
    ]
    peaks = measure_memory(report, prepared, sizes.memory, FORMS, sizes)
    last = sizes.memory[-1]
    share = peaks[last]["chunked"] / peaks[last]["transformers"]
    report.at_most(f"peak memory at {last} tokens, chunked / transformers", 0.25, share)
    report.at_most(f"peak memory at {last} tokens, native / chunked", 1, peaks[last]["native"] / peaks[last]["chunked"])


def prepared(form: str, length: int, sizes: Sizes) -> Callable[[], object]:
    forward_backward(form, inputs(16, sizes))
    return partial(forward_backward, form, inputs(length, sizes))
