"""Stand-ins for mamba-ssm's scans and causal-conv1d's convolution: their copies, saved tensors and outputs.

Selective scan: a channel's tokens must be contiguous, or are copied. The output before the gate is saved, and for every
2,048 tokens two fp32 numbers per state entry. SSD, in chunks: dt and its sum over a chunk in fp32, one state per chunk,
and C B^T per chunk, which the backward pass computes again. Times are lower bounds: only bytes and products count.
(From the packages' sources, in the versions of signatures.json.)

Legend: B rows, L tokens, C or E channels, N state, H heads, P channels of a head, G groups, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.rehearse import heard
from hybridtron.rehearse.stand_ins import Given

SCANNED = 2048  # tokens for which the selective scan's kernel saves one state


def causal_conv1d(given: Given) -> Tensor:
    """Simulate `causal_conv1d_fn`, which reads and writes each row once; backward also reads the gradient."""
    x_BCL = given["x"]
    weight = given["weight"]
    if 1 not in (x_BCL.stride(1), x_BCL.stride(2)):
        x_BCL = x_BCL.contiguous()
    others = [given.get(name) for name in ("bias", "seq_idx", "initial_states")]
    return _Conv.apply(x_BCL, weight, *others)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> Tensor:
        y = torch.empty_like(given[0])  # type: ignore[arg-type]
        ctx.save_for_backward(*given)
        _report("conv forward", given, [y])
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


def selective_scan(given: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Simulate `selective_scan_fn`. Inputs per token are copied if a channel's tokens are not contiguous."""
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    tensors = [given.get(name) for name in names]
    per_token = ("u", "delta", "B", "C", "z")
    contiguous = [
        x.contiguous() if x is not None and name in per_token and x.stride(-1) != 1 else x
        for name, x in zip(names, tensors, strict=True)
    ]
    y, last = _SelectiveScan.apply(*contiguous)
    if given.get("return_last_state"):
        return (y, last)
    return y


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        u_BEL = given[0]
        A_EN = given[2]
        z_BEL = given[6]
        assert u_BEL is not None
        assert A_EN is not None
        batch, channels, length = u_BEL.shape
        chunks = -(-length // SCANNED)
        states = u_BEL.new_empty(batch, channels, chunks, 2 * A_EN.shape[1], dtype=torch.float32)
        y = torch.empty_like(u_BEL)
        gated = y if z_BEL is None else torch.empty_like(u_BEL)
        ctx.save_for_backward(*given, states, y)
        last = states[:, :, -1, 1::2]
        ctx.mark_non_differentiable(last)
        _report("selective_scan forward", given, [states, y, *([] if z_BEL is None else [gated])])
        return gated, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, states, y = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        input_grads = _gradients(inputs, ctx.needs_input_grad)
        sums = [torch.empty_like(x, dtype=torch.float32) for x in inputs[3:5]]  # of B and C, over channels
        _report("selective_scan backward", [*inputs, states, y, grad], [*input_grads, *sums])
        return input_grads


def chunk_scan(given: Given) -> Tensor | tuple[Tensor, Tensor]:
    """Simulate `mamba_chunk_scan_combined`, the scan of Mamba-2."""
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states", "seq_idx")
    y, last = _ChunkScan.apply(given["chunk_size"], *(given.get(name) for name in names))
    if given.get("return_final_states"):
        return (y, last)
    return y


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: int, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        x_BLHP = given[0]
        assert x_BLHP is not None
        steps, states, products = _inside(given, chunk)
        y = torch.empty_like(x_BLHP, memory_format=torch.contiguous_format)
        last = states[:, 0].clone()
        ctx.save_for_backward(*given, *steps, y)
        ctx.chunk = chunk
        _report("ssd forward", [*given, *steps, states, products], [*steps, states, products, y], _flops(given, chunk))
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


def _inside(given: Sequence[Tensor | None], chunk: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Allocate a pass's inner tensors: dt and its sums, states at the ends of chunks, each chunk's C B^T."""
    x_BLHP = given[0]
    B_BLGN = given[3]
    assert x_BLHP is not None
    assert B_BLGN is not None
    batch, length, heads, size = x_BLHP.shape
    groups, state = B_BLGN.shape[2:]
    chunks = -(-length // chunk)
    steps = [x_BLHP.new_empty(batch, heads, chunks, chunk, dtype=torch.float32) for _ in range(2)]
    states = x_BLHP.new_empty(batch, chunks, heads, size, state, dtype=torch.float32)
    return steps, states, x_BLHP.new_empty(batch, chunks, groups, chunk, chunk, dtype=torch.float32)


def _flops(given: Sequence[Tensor | None], chunk: int) -> int:
    """Return the forward FLOPs: C B^T once per group, its product with x (half is masked), states in and out."""
    x_BLHP = given[0]
    B_BLGN = given[3]
    assert x_BLHP is not None
    assert B_BLGN is not None
    channels = x_BLHP.shape[2] * x_BLHP.shape[3]
    state = B_BLGN.shape[3]
    tokens = x_BLHP.shape[0] * x_BLHP.shape[1]
    return tokens * (2 * chunk * B_BLGN.shape[2] * state + chunk * channels + 2 * 2 * channels * state)


def _gradients(given: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.empty_like(x) if x is not None and wants else None for x, wants in zip(given, wanted, strict=True)
    )


def _report(name: str, read: Sequence[Tensor | None], written: Sequence[Tensor | None], flops: int = 0) -> None:
    moved = sum(x.numel() * x.element_size() for x in (*read, *written) if x is not None)
    heard.runs(name, moved, flops, "product" if flops else "torch")
