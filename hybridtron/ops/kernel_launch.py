"""What all kernels' launchers share.

A launch is typed here, once, as the anything that it is: to a type checker a kernel is the Python function that it is
written as, and not what takes torch's tensors, plain numbers for constants, and options of the compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation, untraced

PROCESSORS = 132  # of an H100, and counted on every GPU: the order in which programs' sums are added depends on it
TRITON = "triton"  # the package, and the name of each implementation that is made of our kernels


def own_kernels(
    place: str, unsupported_reason: Callable[[Any], str | None] = lambda inputs: None
) -> Implementation[Any, Any]:
    """Triton kernels of our own: the function that `file:function` names, whose file is imported when it is called.

    None of them has float64.
    """
    file, _, name = place.partition(":")

    @untraced  # the kernels are compiled already, and what is around them is little
    def call(inputs: tuple[Any, ...]) -> Any:
        return getattr(importlib.import_module(file), name)(inputs)

    def reason(inputs: tuple[Any, ...]) -> str | None:
        if any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in inputs):
            return "the kernels have no float64"
        return unsupported_reason(inputs)

    return Implementation(TRITON, call, "cuda", TRITON, reason)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, registers: int | None = None) -> None:
    """Run as many programs as the grid has places, each by `warps` warps of 32 threads with at most these registers."""
    kernel[grid](*arguments, num_warps=warps, maxnreg=registers)


def programs_at_once(warps: int, resident: int) -> int:
    """Programs that an H100 runs at a time, where each multiprocessor holds `resident` warps and at least one program.

    More would wait for these to end. Fewer leave too little in flight: a turn of a program waits for memory, and memory
    is read at its rate only where each multiprocessor has asked for tens of kilobytes.
    """
    return PROCESSORS * max(1, resident // warps)


@contextmanager
def recorded_launches(note: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Inside, on every thread, no kernel runs: `note` gets each kernel, its grid, its arguments and its options."""
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
    """Inside, on every thread, `note` gets each kernel just before it is launched."""
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
    """`scan.walk`: a kernel of ours by its op and its function."""
    return f"{kernel.fn.__module__.split('.')[-2]}.{kernel.__name__.strip('_')}"


@contextmanager
def tuned_over(most: int) -> Iterator[None]:
    """Inside, kernels of other packages try this number of their configurations, evenly chosen: all take minutes."""
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
    """The same, copied if the last axis is not contiguous: the others may have any strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_in_order(tensor: Tensor) -> Tensor:
    """An empty tensor of this shape; rows and tokens, its first axes, lie in memory in the order that they have there.

    So what projections make, tokens first, is not copied into the order of rows and back.
    """
    if tensor.stride(0) >= tensor.stride(1):
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty(tensor.transpose(0, 1).shape).transpose(0, 1)


def ceil_div(size: int, block: int) -> int:
    """The number of blocks that hold `size` places; since version 3.7 Triton types its `cdiv` for kernels alone."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()
