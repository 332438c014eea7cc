"""Stubs for mamba-ssm's scans and causal-conv1d's convolution, with the same copies, saved tensors and outputs.

The stubs replace the real functions in a training step that is simulated without a GPU. A stub allocates the tensors
that the real function would allocate, and counts the bytes and FLOPs.

The selective scan (Mamba-1) needs inputs with a contiguous last axis, which is the token axis. Other inputs are copied.
For the backward pass the scan saves three kinds of tensors: the inputs, the output before the gate, and for every 2,048
tokens two fp32 numbers per state element.

SSD (Mamba-2) computes a sequence in token chunks. SSD allocates four kinds of tensors:

- dt in fp32
- the cumulative sums of dt * A within each chunk, in fp32
- a state for each chunk
- the matrix C B^T for each chunk, where B and C are the scan's inputs

SSD saves the inputs, dt, the cumulative sums and the output. The backward pass computes states and matrices again.

Modelled times are lower bounds, because only memory traffic and matrix products are counted. The allocations follow the
packages' sources, in the versions that signatures.json names.

Axes in tensor names:

    B   sequences
    L   tokens
    C   channels in the convolution
    E   channels in the selective scan
    N   state size
    H   heads
    P   channels per head
    G   groups
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.rehearse import events
from hybridtron.rehearse.package_stubs import Given

SCANNED = 2048  # number of tokens after which the selective scan's kernel saves a state


def causal_conv1d(arguments: Given) -> Tensor:
    """Simulate `causal_conv1d_fn`.

    The forward pass reads each input once, and writes the output. The backward pass reads the inputs and the output's
    gradient, and writes the inputs' gradients.
    """
    x_BCL = arguments["x"]
    weight = arguments["weight"]
    if 1 not in (x_BCL.stride(1), x_BCL.stride(2)):
        x_BCL = x_BCL.contiguous()
    others = [arguments.get(name) for name in ("bias", "seq_idx", "initial_states")]
    return _Conv.apply(x_BCL, weight, *others)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        y = torch.empty_like(inputs[0])  # type: ignore[arg-type]
        ctx.save_for_backward(*inputs)
        _report("conv forward", inputs, [y])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if 1 not in (grad.stride(1), grad.stride(2)):
            grad = grad.contiguous()
        input_grads = _gradients(inputs, ctx.needs_input_grad)
        _report("conv backward", [*inputs, grad], input_grads)
        return input_grads


def selective_scan(arguments: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Simulate `selective_scan_fn`. Inputs with a token axis are copied if this axis, the last, is not contiguous."""
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    tensors = [arguments.get(name) for name in names]
    per_token = ("u", "delta", "B", "C", "z")
    contiguous = [
        x.contiguous() if x is not None and name in per_token and x.stride(-1) != 1 else x
        for name, x in zip(names, tensors, strict=True)
    ]
    y, last = _SelectiveScan.apply(*contiguous)
    if arguments.get("return_last_state"):
        return (y, last)
    return y


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        u_BEL = inputs[0]
        A_EN = inputs[2]
        z_BEL = inputs[6]
        assert u_BEL is not None
        assert A_EN is not None
        batch, channels, length = u_BEL.shape
        chunks = -(-length // SCANNED)
        states = u_BEL.new_empty(batch, channels, chunks, 2 * A_EN.shape[1], dtype=torch.float32)
        y = torch.empty_like(u_BEL)
        gated = y if z_BEL is None else torch.empty_like(u_BEL)
        ctx.save_for_backward(*inputs, states, y)
        last = states[:, :, -1, 1::2]  # of the two numbers per state element, the second is the state
        ctx.mark_non_differentiable(last)
        _report("selective_scan forward", inputs, [states, y, *([] if z_BEL is None else [gated])])
        return gated, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, y = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        input_grads = _gradients(inputs, ctx.needs_input_grad)
        # gradients of B and C, summed over channels
        sums = [torch.empty_like(x, dtype=torch.float32) for x in inputs[3:5]]
        _report("selective_scan backward", [*inputs, states, y, grad], [*input_grads, *sums])
        return input_grads


def chunk_scan(arguments: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Simulate `mamba_chunk_scan_combined`, Mamba-2's scan."""
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx")
    y, last = _ChunkScan.apply(arguments["chunk_size"], *(arguments.get(name) for name in names))
    if arguments.get("return_final_states"):
        return (y, last)
    return y


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        x_BLHP = inputs[0]
        assert x_BLHP is not None
        steps, states, products = _inside(inputs, chunk)
        y = torch.empty_like(x_BLHP, memory_format=torch.contiguous_format)
        last = states[:, 0].clone()
        ctx.save_for_backward(*inputs, *steps, y)
        ctx.chunk = chunk
        _report(
            "ssd forward", [*inputs, *steps, states, products], [*steps, states, products, y], _flops(inputs, chunk)
        )
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_of_last: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, dt, sums, y = ctx.saved_tensors
        (_, states, products), input_grads = _inside(inputs, ctx.chunk), _gradients(inputs, ctx.needs_input_grad[1:])
        inner = [states, torch.empty_like(states), products, torch.empty_like(products)]
        _report(
            "ssd backward", [*inputs, dt, sums, y, grad, *inner], [*input_grads, *inner], 3 * _flops(inputs, ctx.chunk)
        )
        return None, *input_grads


def _inside(inputs: Sequence[Tensor | None], chunk: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Allocate the tensors that SSD needs in a pass. Return three items:

    - a list of two tensors: dt, and the cumulative sums of dt * A within each chunk
    - each chunk's state
    - the matrix C B^T for each chunk
    """
    x_BLHP = inputs[0]
    B_BLGN = inputs[3]
    assert x_BLHP is not None
    assert B_BLGN is not None
    batch, length, heads, size = x_BLHP.shape
    groups, state = B_BLGN.shape[2:]
    chunks = -(-length // chunk)
    steps = [x_BLHP.new_empty(batch, heads, chunks, chunk, dtype=torch.float32) for _ in range(2)]
    states = x_BLHP.new_empty(batch, chunks, heads, size, state, dtype=torch.float32)
    return steps, states, x_BLHP.new_empty(batch, chunks, groups, chunk, chunk, dtype=torch.float32)


def _flops(inputs: Sequence[Tensor | None], chunk: int) -> int:
    """Return the FLOPs in SSD's forward pass. These matrix products are counted:

    - C B^T for each group
    - the product of C B^T with x, without the masked half
    - the product that computes a chunk's state
    - the product of C with the state before the chunk
    """
    x_BLHP = inputs[0]
    B_BLGN = inputs[3]
    assert x_BLHP is not None
    assert B_BLGN is not None
    channels = x_BLHP.shape[2] * x_BLHP.shape[3]
    state = B_BLGN.shape[3]
    tokens = x_BLHP.shape[0] * x_BLHP.shape[1]
    return tokens * (2 * chunk * B_BLGN.shape[2] * state + chunk * channels + 2 * 2 * channels * state)


def _gradients(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.empty_like(x) if x is not None and wants else None for x, wants in zip(inputs, wanted, strict=True)
    )


def _report(name: str, read: Sequence[Tensor | None], written: Sequence[Tensor | None], flops: int = 0) -> None:
    moved = sum(x.numel() * x.element_size() for x in (*read, *written) if x is not None)
    events.report_kernel(name, moved, flops, "product" if flops else "torch")
