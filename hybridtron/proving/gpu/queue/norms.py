"""Times the norm's backward pass with several numbers of Triton programs, and torch's norm for comparison.

A row is one token's channels. Each Triton program handles several rows one after another, and waits for memory at each
row. Too few programs leave the GPU idle. Each program also sums the weight's gradient over its own rows. With too many
programs, adding up these partial sums takes longer. On a CPU no kernel is launched.

Letters for shapes: R rows, D channels.
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

GRIDS = (264, 1056, 4224)  # numbers of programs to try, in addition to the default number
SHAPES = ((262144, 96), (262144, 192), (65536, 256), (65536, 512), (32768, 1024), (16384, 2304))  # rows, channels
EPS = 1e-5
TINY_ROWS = 256


def norms(record: Recorder) -> None:
    """Record for each shape the milliseconds of torch's and our backward pass, and the GB in x, dy and dx together."""
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
    """Yield pairs (name, call to our backward pass), for a rehearsal.

    For each shape the first call has the default program count, and the next calls have the numbers in GRIDS.
    """
    for shape in SHAPES:
        x_RD, dy_RD, weight_D = tensors(*shape)
        variants = list(forms(x_RD.detach(), dy_RD, weight_D.detach()))
        yield key(*shape), variants[0][1]
        for name, call in variants[1:]:
            yield f"{key(*shape)}, {name}", call


def tensors(rows: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x and dy, and a weight filled with ones."""
    x_RD = torch.randn(rows, channels, device=compute_device()).bfloat16()
    dy_RD = torch.randn(rows, channels, device=compute_device()).bfloat16()
    return x_RD.requires_grad_(), dy_RD, torch.ones(channels, device=compute_device()).requires_grad_()


def torchs(x_RD: Tensor, dy_RD: Tensor, weight_D: Tensor) -> float:
    """Return the milliseconds of torch's backward pass. The graph is retained, so the forward pass runs only once."""
    y_RD = functional.rms_norm(x_RD, weight_D.shape, weight_D.to(x_RD.dtype), EPS)
    return 1e3 * fastest(lambda: torch.autograd.grad(y_RD, (x_RD, weight_D), dy_RD, retain_graph=True))


def forms(x_RD: Tensor, dy_RD: Tensor, weight_D: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield pairs (name, call to our kernel): first with the default program count (`ours`), then with GRIDS."""
    from hybridtron.ops.norm.kernels import gradients  # imports Triton

    scale_R = torch.rsqrt(x_RD.float().square().mean(1) + EPS)
    for programs in (None, *GRIDS):
        yield f"{programs or 'ours'}", partial(gradients, x_RD, weight_D, scale_R, dy_RD, programs=programs)


def nowhere() -> AbstractContextManager[None]:
    """Return a context in which Triton launches are ignored on a CPU. On a GPU the context changes nothing."""
    if compute_device().type == "cuda":
        return nullcontext()
    return recorded_launches(lambda *_: None)
