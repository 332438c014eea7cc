"""Times the norm's backward pass by its number of programs, compared with our default and with torch's norm.

A program handles several rows one after another, and waits for memory at each. Too few programs leave the GPU waiting;
too many make the sum of their parts of dw longer. On a CPU no kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.device import compute_device
from hybridtron.ops.kernel_launch import recorded_launches
from hybridtron.proving.gpu.queue.machine import fastest
from hybridtron.proving.gpu.queue.rows import Recorder

GRIDS = (264, 1056, 4224)
SHAPES = ((262144, 96), (262144, 192), (65536, 256), (65536, 512), (32768, 1024), (16384, 2304))  # rows, channels
EPS = 1e-5
TINY_ROWS = 256


def norms(record: Recorder) -> None:
    """Record the milliseconds of the backward pass by number of programs, and the bytes of x, dy and dx."""
    for shape in SHAPES:
        rows, channels = shape
        if record.tiny:
            rows = min(rows, TINY_ROWS)
        with record.case(f"{rows}x{channels}") as row:
            row["gb"] = 3 * rows * channels * 2 / 1e9
            x_RD, dy_RD, weight_D = tensors(rows, channels)
            row["torch_ms"] = torchs(x_RD, dy_RD, weight_D)
            for name, call in forms(x_RD.detach(), dy_RD, weight_D.detach()):
                with nowhere():
                    row[f"{name}_ms"] = 1e3 * fastest(call)
            row["model_ms"] = record.modelled.get("calls", {}).get(key(rows, channels), {}).get("ms")


def key(rows: int, channels: int) -> str:
    return f"norm backward {rows}x{channels}"


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the backward pass with our default number of programs at every shape, by name, then with the other
    grids.
    """
    for shape in SHAPES:
        x_RD, dy_RD, weight_D = tensors(*shape)
        variants = list(forms(x_RD.detach(), dy_RD, weight_D.detach()))
        yield key(*shape), variants[0][1]
        for name, call in variants[1:]:
            yield f"{key(*shape)}, {name}", call


def tensors(rows: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x and dy, and a weight of ones."""
    x_RD = torch.randn(rows, channels, device=compute_device()).bfloat16()
    dy_RD = torch.randn(rows, channels, device=compute_device()).bfloat16()
    return x_RD.requires_grad_(), dy_RD, torch.ones(channels, device=compute_device()).requires_grad_()


def torchs(x_RD: Tensor, dy_RD: Tensor, weight_D: Tensor) -> float:
    """Return the milliseconds of torch's backward pass, on a retained graph."""
    y_RD = functional.rms_norm(x_RD, weight_D.shape, weight_D.to(x_RD.dtype), EPS)
    return 1e3 * fastest(lambda: torch.autograd.grad(y_RD, (x_RD, weight_D), dy_RD, retain_graph=True))


def forms(x_RD: Tensor, dy_RD: Tensor, weight_D: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield our kernel with its default number of programs, then with others."""
    from hybridtron.ops.norm.kernels import gradients  # imports Triton

    scale_R = torch.rsqrt(x_RD.float().square().mean(1) + EPS)
    for programs in (None, *GRIDS):
        yield f"{programs or 'ours'}", partial(gradients, x_RD, weight_D, scale_R, dy_RD, programs=programs)


def nowhere() -> AbstractContextManager[None]:
    """Return a context in which a CPU launches no kernel."""
    if compute_device().type == "cuda":
        return nullcontext()
    return recorded_launches(lambda *_: None)
