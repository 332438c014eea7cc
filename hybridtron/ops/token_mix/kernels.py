"""Triton kernels for token mixing, one kernel for each direction; `reference.py` has the equations.

A program computes a tile: some tokens by some channels, in all streams. It also reads each token's predecessor, and in
the backward pass the weights and gradients of each token's successor. Other programs read the same values, so most of
these reads come from the cache. The gradient of `mix` is a sum over all tokens: every program stores each stream's sum
over the tile's tokens, and `sum_kernels` adds up the sums of all programs. There are no atomics, so results are
deterministic. Numbers are computed in fp32.

Legend: S streams, L tokens, B rows (sequences in the batch), D channels, R tokens of all rows (token t in row b has the
index t * B + b), Q tiles along R.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import ceil_div, launch
from hybridtron.ops.sum_kernels import sum_of_parts
from hybridtron.ops.token_mix.reference import TokenMixInputs
from hybridtron.ops.token_mix.triton import MOST_STREAMS

TOKENS = 32  # per program
CHANNELS = 64  # per program
WARPS = 4


def token_mix(inputs: TokenMixInputs) -> tuple[Tensor, ...]:
    """Return every stream. Gradients with respect to all inputs except the documents are supported."""
    return _TokenMix.apply(*inputs)  # type: ignore[return-value]


class _TokenMix(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, ...]:
        saved: list[Any] = [None if field is None else field.contiguous() for field in fields]
        ctx.save_for_backward(*saved)
        inputs = TokenMixInputs(*saved)
        streams_SLBD = inputs.x_LBD.new_empty(len(inputs.mix_SD), *inputs.x_LBD.shape)
        launch(_forward, _grid(inputs), *inputs, streams_SLBD, *_sizes(inputs), warps=WARPS)
        return streams_SLBD.unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        inputs = TokenMixInputs(*saved)
        grads = tuple(grad.contiguous() for grad in grads)
        streams = len(grads)
        of_streams = grads + grads[:1] * (MOST_STREAMS - streams)  # no kernel reads the additional tensors
        grid = _grid(inputs)
        grad_x_LBD = torch.empty_like(inputs.x_LBD)
        grad_change = None if inputs.change_SLBD is None else torch.empty_like(inputs.change_SLBD)
        grad_first = None if inputs.first_BD is None else torch.empty_like(inputs.first_BD)
        if grad_first is not None and inputs.x_LBD.numel() == 0:
            grad_first.zero_()  # rows are empty, so no program runs that would fill this tensor
        sums_SQD = inputs.x_LBD.new_empty(streams, grid[0], inputs.x_LBD.shape[2], dtype=torch.float32)
        launch(
            _backward, grid, *inputs, *of_streams, grad_x_LBD, grad_change, grad_first, sums_SQD, *_sizes(inputs),
            warps=WARPS,
        )  # fmt: skip
        return grad_x_LBD, sum_of_parts(sums_SQD, inputs.mix_SD.dtype), grad_change, grad_first, None


def _grid(inputs: TokenMixInputs) -> tuple[int, int]:
    length, rows, channels = inputs.x_LBD.shape
    return ceil_div(length * rows, TOKENS), ceil_div(channels, CHANNELS)


def _sizes(inputs: TokenMixInputs) -> tuple[int, ...]:
    """Return the kernels' last arguments: L, B, D, S, and a tile's tokens and channels."""
    return *inputs.x_LBD.shape, len(inputs.mix_SD), TOKENS, CHANNELS


@triton.jit
def _same_document(
    documents_BL: tl.tensor, index_R: tl.tensor, length: int, rows: int, inside_R: tl.tensor
) -> tl.tensor:
    """Return a mask of the tokens whose predecessor is in their document; it is False for a row's first token."""
    same_R = inside_R & (index_R >= rows)
    if documents_BL is not None:
        at_R = index_R % rows * length + index_R // rows
        own_R = tl.load(documents_BL + at_R, same_R, 0)
        same_R = same_R & (own_R == tl.load(documents_BL + at_R - 1, same_R, 0))
    return same_R


@triton.jit
def _differences(
    x_LBD: tl.tensor, first_BD: tl.tensor, documents_BL: tl.tensor, index_R: tl.tensor, d: tl.tensor, length: int,
    rows: int, channels: int,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return each token's predecessor minus the token, and the token."""
    inside_R = index_R < length * rows
    inside = tl.expand_dims(inside_R, 1) & tl.expand_dims(d < channels, 0)
    at = index_R[:, None] * channels + d[None, :]
    x = tl.load(x_LBD + at, inside, 0.0).to(tl.float32)
    continues_R = _same_document(documents_BL, index_R, length, rows, inside_R)
    continues = tl.expand_dims(continues_R, 1) & tl.expand_dims(d < channels, 0)
    before = tl.load(x_LBD + at - rows * channels, continues, 0.0).to(tl.float32)
    if first_BD is not None:
        before += tl.load(first_BD + at, inside & tl.expand_dims(index_R < rows, 1), 0.0).to(tl.float32)
    return before - x, x


@triton.jit
def _weights(
    mix_SD: tl.tensor, change_SLBD: tl.tensor, index_R: tl.tensor, inside: tl.tensor, d: tl.tensor, channels: int,
    tokens: int, STREAM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return one stream's interpolation weights at the tokens R, and 0 outside the mask `inside`."""
    weight = tl.load(mix_SD + STREAM * channels + d, d < channels, 0.0).to(tl.float32)[None, :]
    if change_SLBD is not None:
        at = (STREAM * tokens + index_R)[:, None] * channels + d[None, :]
        weight += tl.load(change_SLBD + at, inside, 0.0).to(tl.float32)
    return tl.where(inside, weight, 0.0)


@triton.jit
def _forward(
    x_LBD: tl.tensor, mix_SD: tl.tensor, change_SLBD: tl.tensor, first_BD: tl.tensor, documents_BL: tl.tensor,
    streams_SLBD: tl.tensor, length: int, rows: int, channels: int, STREAMS: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store all streams of a tile. Grid: (tiles along R, tiles along D)."""
    index_R = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tokens = length * rows
    inside = tl.expand_dims(index_R < tokens, 1) & tl.expand_dims(d < channels, 0)
    difference, x = _differences(x_LBD, first_BD, documents_BL, index_R, d, length, rows, channels)
    for stream in tl.static_range(STREAMS):
        weight = _weights(mix_SD, change_SLBD, index_R, inside, d, channels, tokens, stream)
        at = (stream * tokens + index_R)[:, None] * channels + d[None, :]
        tl.store(streams_SLBD + at, x + difference * weight, inside)


@triton.jit
def _stream_gradients(
    grad_LBD: tl.tensor, mix_SD: tl.tensor, change_SLBD: tl.tensor, grad_change_SLBD: tl.tensor, sums_SQD: tl.tensor,
    grad_x: tl.tensor, of_first: tl.tensor, difference: tl.tensor, continued_R: tl.tensor, index_R: tl.tensor,
    d: tl.tensor, tokens: int, rows: int, channels: int, STREAM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Store one stream's gradients of `change` and `mix`; return `grad_x` and `of_first` with the stream's terms added.

    `continued` is True at tokens whose successor is in the same document; `of_first` is the predecessors' gradient.
    """
    inside = tl.expand_dims(index_R < tokens, 1) & tl.expand_dims(d < channels, 0)
    at = index_R[:, None] * channels + d[None, :]
    grad = tl.load(grad_LBD + at, inside, 0.0).to(tl.float32)
    weight = _weights(mix_SD, change_SLBD, index_R, inside, d, channels, tokens, STREAM)
    of_weight = grad * difference
    if grad_change_SLBD is not None:
        at_change = (STREAM * tokens + index_R)[:, None] * channels + d[None, :]
        tl.store(grad_change_SLBD + at_change, of_weight, inside)
    at_sum = (STREAM * tl.num_programs(0) + tl.program_id(0)) * channels + d
    tl.store(sums_SQD + at_sum, tl.sum(of_weight, 0), d < channels)
    next_inside = tl.expand_dims(continued_R, 1) & tl.expand_dims(d < channels, 0)
    next_at = at + rows * channels
    next_grad = tl.load(grad_LBD + next_at, next_inside, 0.0).to(tl.float32)
    next_weight = _weights(mix_SD, change_SLBD, index_R + rows, next_inside, d, channels, tokens, STREAM)
    return grad_x + grad * (1.0 - weight) + next_grad * next_weight, of_first + grad * weight


@triton.jit
def _backward(
    x_LBD: tl.tensor, mix_SD: tl.tensor, change_SLBD: tl.tensor, first_BD: tl.tensor, documents_BL: tl.tensor,
    grad_0: tl.tensor, grad_1: tl.tensor, grad_2: tl.tensor, grad_3: tl.tensor, grad_4: tl.tensor,
    grad_x_LBD: tl.tensor, grad_change_SLBD: tl.tensor, grad_first_BD: tl.tensor, sums_SQD: tl.tensor, length: int,
    rows: int, channels: int, STREAMS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store all gradients of a tile. Grid: (tiles along R, tiles along D).

    The gradient of `mix` is stored as a partial sum. `grad_0` to `grad_4` are the streams' gradients, of which the
    first STREAMS are read.
    """
    index_R = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tokens = length * rows
    at = index_R[:, None] * channels + d[None, :]
    difference, x = _differences(x_LBD, first_BD, documents_BL, index_R, d, length, rows, channels)
    continued_R = _same_document(documents_BL, index_R + rows, length, rows, index_R + rows < tokens)
    grad_x = tl.zeros_like(x)
    of_first = tl.zeros_like(x)
    for stream in tl.static_range(STREAMS):
        if stream == 0:
            grad_LBD = grad_0
        elif stream == 1:
            grad_LBD = grad_1
        elif stream == 2:
            grad_LBD = grad_2
        elif stream == 3:
            grad_LBD = grad_3
        else:
            grad_LBD = grad_4
        grad_x, of_first = _stream_gradients(
            grad_LBD, mix_SD, change_SLBD, grad_change_SLBD, sums_SQD, grad_x, of_first, difference, continued_R,
            index_R, d, tokens, rows, channels, stream,
        )  # fmt: skip
    inside = tl.expand_dims(index_R < tokens, 1) & tl.expand_dims(d < channels, 0)
    tl.store(grad_x_LBD + at, grad_x, inside)
    if grad_first_BD is not None:
        tl.store(grad_first_BD + at, of_first, inside & tl.expand_dims(index_R < rows, 1))
