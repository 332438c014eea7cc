"""Helpers for Triton kernels: launches, the recording of launches in simulations, output layouts and grid sizes.

Most kernels are launched by `launch`, because its arguments are untyped. A type checker would refuse a direct launch:
it sees a kernel as a Python function with parameters of type `tl.tensor`, but a launch passes torch tensors and
compiler options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation, left_to_torch_compile, untraced

PROCESSORS = 132  # multiprocessors of an H100; used for all GPUs, so that all GPUs add partial sums in the same order
TRITON = "triton"  # name of the package, and of the implementations that run this project's kernels


def own_kernels(
    place: str, unsupported_reason: Callable[[Any], str | None] = lambda inputs: None
) -> Implementation[Any, Any]:
    """Wrap this project's Triton kernels as an implementation; `place` is `module:function`.

    The module is imported at the first call. Inputs in float64 are refused, since no kernel takes them. Other inputs
    are refused if `unsupported_reason` returns a reason (not None).
    """
    file, _, name = place.partition(":")

    @untraced  # torch.compile would gain little: the kernels are compiled, and little code around them could be fused
    def call(inputs: tuple[Any, ...]) -> Any:
        return getattr(importlib.import_module(file), name)(inputs)

    def reason(inputs: tuple[Any, ...]) -> str | None:
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in inputs):
            return "the kernels do not support float64"
        return unsupported_reason(inputs)

    return Implementation(TRITON, call, "cuda", TRITON, reason)


def refused_above(most: int, size: int, what: str) -> str | None:
    """Return the reason why an op's elementwise kernels do not take inputs of this size, or None if they do.

    While torch.compile traces, the kernels take no inputs, since torch.compile fuses such ops itself. `most` is the
    largest size that the kernels take, and `what` describes the input.
    """
    if size <= most:
        too_large = None
    else:
        too_large = f"{what}; the kernels take {most}"
    return left_to_torch_compile() or too_large


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, registers: int | None = None) -> None:
    """Run one program per grid point, each with `warps` warps of 32 threads.

    The compiler uses at most `registers` registers per thread (None: no limit).
    """
    kernel[grid](*arguments, num_warps=warps, maxnreg=registers)


def programs_at_once(warps: int, resident: int) -> int:
    """Return the number of programs that an H100 runs at a time, if a multiprocessor holds `resident` warps.

    The number is a good grid size. With more programs, some would begin only after others end. With fewer, too few
    loads would be in flight: an H100 reads memory at full rate only if each multiprocessor has requests for tens of
    kilobytes. At least one program per multiprocessor is counted.
    """
    return PROCESSORS * max(1, resident // warps)


@contextmanager
def recorded_launches(note: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside the block, replace each kernel launch on any thread by a call to `note`.

    `note` gets the kernel, grid, arguments and compiler options. No kernel runs.
    """
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        note(kernel, grid, arguments, options)

    launched, JITFunction.run = JITFunction.run, run
    try:
        yield
    finally:
        JITFunction.run = launched


@contextmanager
def noted_launches(note: Callable[[Any], object]) -> Iterator[None]:
    """Inside the block, call `note` with each kernel just before its launch, on any thread; the kernel then runs."""
    from triton.runtime.jit import JITFunction

    launched = JITFunction.run

    def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
        if not options.get("warmup"):
            note(kernel)
        return launched(kernel, *arguments, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launched


def kernel_name(kernel: Any) -> str:
    """Return a name such as `scan.walk`: the op's folder, and the kernel's function without leading underscores."""
    return f"{kernel.fn.__module__.split('.')[-2]}.{kernel.__name__.strip('_')}"


@contextmanager
def tuned_over(most: int) -> Iterator[None]:
    """Inside the block, let other packages' autotuned kernels try at most `most` configurations per kernel.

    The tried configurations are evenly spaced in the kernel's list. To try the full list would take minutes.
    """
    from triton.runtime.autotuner import Autotuner

    tuned = Autotuner.run

    def run(tuner: Any, *arguments: Any, **options: Any) -> Any:
        step = ceil_div(len(tuner.configs), most)
        tuner.configs = tuner.configs[step // 2 :: step]
        return tuned(tuner, *arguments, **options)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = tuned


def last_side_by_side(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its last axis is contiguous, else a fully contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def heads_side_by_side(tensor: Tensor) -> Tensor:
    """Return a tensor (B, L, H, P) itself if each token's heads are contiguous, else a fully contiguous copy."""
    return tensor if tensor.stride()[2:] == (tensor.shape[3], 1) else tensor.contiguous()


def empty_in_order(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape of `tensor` and the memory order of its first two axes.

    The first two axes are rows and tokens. In memory, tokens are the outermost axis of a projection's output. If an
    op's output has the same memory order, no copy is needed between the op and the projections.
    """
    if tensor.stride(0) >= tensor.stride(1):
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty(tensor.transpose(0, 1).shape).transpose(0, 1)


def strided(*tensors: Tensor) -> tuple[Any, ...]:
    """Return kernel arguments: each tensor, followed by its row stride and its token stride."""
    return tuple(value for tensor in tensors for value in (tensor, *tensor.stride()[:2]))


def tile_of_rows(channels: int, elements: int, warp_elements: int) -> tuple[int, int, int]:
    """Return three numbers: rows per tile, channels rounded up to a power of two, and warps per tile.

    A tile has at most `elements` elements, but at least one row. A warp computes `warp_elements` elements.
    """
    block = power_of_2(channels)
    rows = max(1, elements // block)
    return rows, block, max(1, rows * block // warp_elements)


def ceil_div(size: int, block: int) -> int:
    """Return the number of blocks that cover `size`.

    Triton's own `cdiv` is not used: from Triton 3.7 on, its types fit only calls inside kernels.
    """
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
