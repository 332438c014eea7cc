"""The selective scan alone: our chunked form against our reference loop and transformers' loop, and against a floor.

The floor is what any form has to do: read the inputs and write the outputs once forward, read them and the output's
gradient and write the inputs' gradients once backward, and form the L x E x N decays exp(delta A). Both are timed in
the same rounds: a copy of that many bytes, and exp over that many values in a buffer that stays in the cache.

Peak memory is that of a fresh process per form: the highest resident set during one forward and backward pass, less
what was resident before it, when the inputs existed. Such a process runs `probe`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.scan import ScanInputs, selective_scan
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

MIB = 2**20
CACHED = 2**16  # values of the buffer over which the exp floor is measured


@dataclass(frozen=True)
class Sizes:
    """What is measured: E channels, N state entries, and how many rounds each length is worth for the loops."""

    channels: int
    state: int
    loops: dict[int, int]
    alone: tuple[int, ...]
    memory: tuple[int, ...]
    memory_forms: tuple[str, ...]


FULL = Sizes(
    channels=512,
    state=16,
    loops={256: 5, 512: 5},
    alone=(1024, 4096),
    memory=(512, 1024),
    memory_forms=("chunked", "reference", "transformers"),
)
QUICK = Sizes(channels=64, state=16, loops={16: 2, 32: 1}, alone=(64,), memory=(192,), memory_forms=("chunked",))


def inputs(length: int, channels: int, state: int) -> list[Tensor]:
    """x, dt, A, B, C, D, z, dt_bias of one row, with ranges as in a trained mixer; all want gradients."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    A_EN = -torch.arange(1.0, state + 1).repeat(channels, 1)
    x_BLE, dt_BLE, z_BLE = (normal(1, length, channels) for _ in range(3))
    B_BLN, C_BLN = (normal(1, length, state) for _ in range(2))
    tensors = [x_BLE, 0.1 * dt_BLE, A_EN, B_BLN, C_BLN, normal(channels), z_BLE, normal(channels) - 4]
    return [tensor.requires_grad_() for tensor in tensors]


def peer_scan(tensors: list[Tensor]) -> Tensor:
    """transformers' scan on the same tensors; it wants the tokens last."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    x, dt, A_EN, B, C, D_E, z, dt_bias_E = tensors
    x, dt, B, C, z = (tensor.transpose(1, 2) for tensor in (x, dt, B, C, z))
    return mamba_selective_scan(x, dt, A_EN, B, C, D_E, z, dt_bias_E, delta_softplus=True).transpose(1, 2)


def our_scan(form: str) -> Callable[[list[Tensor]], Tensor]:
    def scan(tensors: list[Tensor]) -> Tensor:
        x, dt, A_EN, B, C, D_E, z, dt_bias_E = tensors
        with force(selective_scan=form):
            return selective_scan(ScanInputs(x, dt, A_EN, B, C, D_E, dt_bias_E, z))[0]

    return scan


SCANS = {"chunked": our_scan("chunked"), "reference": our_scan("reference"), "transformers": peer_scan}


def forward_backward(form: str, tensors: list[Tensor]) -> list[Tensor]:
    """The output and every input's gradient."""
    y_BLE = SCANS[form](tensors)
    return [y_BLE.detach(), *torch.autograd.grad(y_BLE.square().mean(), tensors)]


def floor_bytes(sizes: Sizes) -> int:
    """Bytes per token, fp32: forward x, dt, z, B, C -> y; backward the same and dy -> dx, ddt, dz, dB, dC."""
    forward = 4 * sizes.channels + 2 * sizes.state
    backward = 7 * sizes.channels + 4 * sizes.state
    return 4 * (forward + backward)


def copy_floor(sizes: Sizes, length: int) -> Callable[[], object]:
    """A copy that moves as many bytes as the floor of a row does; a copy of n bytes moves 2 n."""
    source = torch.ones(length * floor_bytes(sizes) // 8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def exp_floor(sizes: Sizes, length: int) -> Callable[[], object]:
    buffer = -torch.rand(CACHED)
    out = torch.empty_like(buffer)
    pieces = max(1, length * sizes.channels * sizes.state // CACHED)
    return lambda: [torch.exp(buffer, out=out) for _ in range(pieces)]


def bench(settings: BenchSettings) -> BenchReport:
    """Speed, floor, memory."""
    sizes = QUICK if settings.quick else FULL
    cells, console = [], []
    for length in (*sizes.loops, *sizes.alone):
        timings = _timed(sizes, length, settings)
        console += [f"{name} at {length}: {timing}" for name, timing in timings.items()]
        console += [f"chunked at {length}: {length / timings['chunked'].fastest:,.0f} tokens/s"]
        cells.append(
            (f"{length}", *(_over(timings, name) for name in ("reference", "transformers")), *_floors(timings))
        )
    header = ("tokens", "reference / chunked", "transformers / chunked", "chunked / copy floor", "chunked / exp floor")
    per_token = 3 * 7 * sizes.channels * sizes.state
    notes = [
        f"batch 1, {sizes.channels} channels, state {sizes.state}, fp32, forward and backward, gradients of all inputs",
        f"floor per token: {floor_bytes(sizes):,} bytes moved, {per_token:,} FLOPs (3 x 7 x channels x state), "
        f"{sizes.channels * sizes.state:,} exponentials",
        f"outputs and gradients of all forms agree; {settings.repetitions} rounds",
    ]
    measured = peak_memories(sizes)
    goals = []
    if not settings.quick:
        share = measured[1024]["chunked"] / measured[1024]["transformers"]
        goals = [Goal.at_most("peak memory at 1024 tokens, chunked / transformers", 0.25, share)]
    tables = [BenchTable("time", header, cells), memory_rows(measured)]
    return BenchReport("Selective scan (Mamba-1)", "cpu", tables, goals, notes, console)


def _timed(sizes: Sizes, length: int, settings: BenchSettings) -> dict[str, Timing]:
    tensors = inputs(length, sizes.channels, sizes.state)
    loops = min(sizes.loops.get(length, 0), settings.repetitions)
    forms = {
        form: Contender(lambda form=form: forward_backward(form, tensors), rounds)
        for form, rounds in zip(SCANS, (settings.repetitions, loops, loops), strict=True)
        if rounds
    }
    forms["copy"] = Contender(copy_floor(sizes, length), settings.repetitions)
    forms["exp"] = Contender(exp_floor(sizes, length), settings.repetitions)
    if length == min(sizes.loops):
        expected = forward_backward("transformers", tensors)
        for form in ("chunked", "reference"):
            for got, wanted in zip(forward_backward(form, tensors), expected, strict=True):
                assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max(), f"{form} differs from transformers"
    return interleaved(forms)


def _over(timings: dict[str, Timing], name: str) -> str:
    return times(timings[name].fastest / timings["chunked"].fastest) if name in timings else ""


def _floors(timings: dict[str, Timing]) -> tuple[str, str]:
    return times(timings["chunked"].fastest / timings["copy"].fastest), times(
        timings["chunked"].fastest / timings["exp"].fastest
    )


def memory_rows(measured: dict[int, dict[str, int]]) -> BenchTable:
    """Peak memory of each form, and the chunked form's share of the last one's."""
    forms = list(next(iter(measured.values())))
    cells = [
        (f"{length}", *(f"{peak / MIB:,.1f}" for peak in peaks.values()), f"{peaks['chunked'] / peaks[forms[-1]]:.3f}")
        for length, peaks in measured.items()
    ]
    header = ("tokens", *(f"{form}, MiB" for form in forms), f"chunked / {forms[-1]}")
    return BenchTable("peak memory of one forward and backward pass", header, cells)


def peak_memories(sizes: Sizes) -> dict[int, dict[str, int]]:
    """Peak memory by length and form; two processes at a time, since none shares memory with another."""
    wanted = [(length, form) for length in sizes.memory for form in sizes.memory_forms]
    with ThreadPoolExecutor(2) as pool:
        peaks = list(pool.map(lambda pair: peak_memory(pair[1], pair[0], sizes), wanted))
    measured: dict[int, dict[str, int]] = {length: {} for length in sizes.memory}
    for (length, form), peak in zip(wanted, peaks, strict=True):
        measured[length][form] = peak
    return measured


def peak_memory(form: str, length: int, sizes: Sizes) -> int:
    """Bytes that one pass adds to a fresh process."""
    call = f"probe({form!r}, {length}, {sizes.channels}, {sizes.state})"
    return in_fresh_process(f"from {__name__} import probe; {call}")


def in_fresh_process(code: str, environment: Mapping[str, str] | None = None) -> int:
    """The number that a Python process of its own prints last."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # this process may have found its packages by a door's own path
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**(environment or os.environ), **path},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def probe(form: str, length: int, channels: int, state: int) -> None:
    """The body of that process: a tiny pass first, so that what every first pass loads is not counted."""
    torch.set_num_threads(1)
    forward_backward(form, inputs(16, channels, state))
    tensors = inputs(length, channels, state)
    before = resident(reset=True)
    forward_backward(form, tensors)
    print(max(resource.getpagesize(), resident(reset=False) - before))


def resident(reset: bool) -> int:
    """The highest resident set so far, in bytes; with `reset` the present one, from which Linux then counts again."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS counts bytes, and can't be reset
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
