"""The short causal convolution in Triton, forward and backward; `reference.py` has the equations and the reference.

A program has a tile of tokens and channels. Forward reads the inputs of all taps from memory where they lie, W times
each: all but the first time out of the cache. Backward walks over a tile and W - 1 tokens more, with inputs and
gradients of the last W in registers, and computes the sum before SiLU again. No thread needs another's values.

The gradients of weight and bias are partial sums of every tile, which torch adds up in a fixed order: no atomic
addition, the same bits every time. Not here: float64, widths above 8. Right on an H200 (benchmarks/gpu.md).

Legend: B rows, L tokens, C channels, W width, T = W - 1 tokens of tail, Q tiles of tokens.
"""

# ruff: noqa: RUF005 (Triton joins tuples, and unpacks none)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import ConvInputs, new_tail
from hybridtron.ops.kernel_launch import ceil_div, empty_in_order, last_side_by_side, launch

TOKENS = 32  # of one program, forward
CHANNELS = 64
WARPS = 8
WALK_TOKENS = 64  # of one program, backward
WALK_CHANNELS = 128  # of one warp


@dataclass(frozen=True)
class ConvRow:
    """The op's inputs as the kernels read them: channels side by side, parameters in fp32, the tail in x's type."""

    x_BLC: Tensor
    weight_WC: Tensor
    bias_C: Tensor | None
    tail_BTC: Tensor | None
    documents_BL: Tensor | None
    activation: bool

    @staticmethod
    def of(inputs: ConvInputs) -> ConvRow:
        x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation = inputs
        return ConvRow(
            last_side_by_side(x_BLC),
            weight_CW.t().float().contiguous(),
            None if bias_C is None else bias_C.float().contiguous(),
            None if tail_BTC is None else tail_BTC.to(x_BLC.dtype).contiguous(),
            None if documents_BL is None else documents_BL.contiguous(),
            activation,
        )

    def arguments(self) -> tuple[Any, ...]:
        """What both kernels take first."""
        tensors = (self.x_BLC, self.weight_WC, self.bias_C, self.tail_BTC, self.documents_BL)
        return *tensors, *self.x_BLC.shape[1:], *self.x_BLC.stride()[:2]

    def grid(self, positions: int, tokens: int, width: int) -> tuple[int, int, int]:
        """Tokens first: that axis alone may exceed 65,535."""
        rows, _, channels = self.x_BLC.shape
        return ceil_div(positions, tokens), ceil_div(channels, width), rows


def causal_conv(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    return _TritonConv.apply(*inputs), new_tail(inputs)


class _TritonConv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        inputs = ConvInputs(*fields)
        ctx.save_for_backward(*inputs[:-1])
        ctx.activation = inputs.activation
        return forward(ConvRow.of(inputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        inputs = ConvInputs(*tensors, activation=ctx.activation)
        found = backward(ConvRow.of(inputs), grad_y_BLC)
        given = (None if t is None or g is None else g.to(t.dtype) for g, t in zip(found[:4], inputs[:4], strict=True))
        return *given, None, None


def forward(row: ConvRow) -> Tensor:
    y_BLC = empty_in_order(row.x_BLC)
    grid = row.grid(row.x_BLC.shape[1], TOKENS, CHANNELS)
    launch(
        _forward, grid, *row.arguments(), y_BLC, *y_BLC.stride()[:2],
        row.activation, len(row.weight_WC), TOKENS, CHANNELS, warps=WARPS,
    )  # fmt: skip
    return y_BLC


def backward(row: ConvRow, grad_y_BLC: Tensor) -> ConvInputs:
    """The gradients of the op's tensors, in their places; those of weight and bias in fp32."""
    grad_y_BLC = last_side_by_side(grad_y_BLC)
    width, channels = row.weight_WC.shape
    grid = row.grid(row.x_BLC.shape[1] + width - 1, WALK_TOKENS, WALK_CHANNELS)
    grad_x_BLC = empty_in_order(row.x_BLC)
    grad_tail_BTC = None if row.tail_BTC is None else torch.empty_like(row.tail_BTC)
    sums_BQWC = row.weight_WC.new_empty(grid[2], grid[0], width + 1, channels)  # bias last
    launch(
        _backward, grid, *row.arguments(), grad_y_BLC, *grad_y_BLC.stride()[:2], grad_x_BLC, *grad_x_BLC.stride()[:2],
        grad_tail_BTC, sums_BQWC, row.activation, width, WALK_TOKENS, WALK_CHANNELS, warps=1,
    )  # fmt: skip
    *of_taps, of_bias_C = sums_BQWC.sum((0, 1))
    return ConvInputs(grad_x_BLC, torch.stack(of_taps, dim=1), of_bias_C, grad_tail_BTC)


@triton.jit
def _input(
    x_ptr: tl.tensor, tail_ptr: tl.tensor, row: tl.tensor, t: tl.tensor, c: tl.tensor, of_c: tl.tensor, length: int,
    channels: int, x_row: int, x_token: int, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Inputs of a tile of tokens, of which those before the row lie in its tail; in fp32."""
    place = row * x_row + t.to(tl.int64)[:, None] * x_token + c[None, :]
    x = tl.load(x_ptr + place, tl.expand_dims((t >= 0) & (t < length), 1) & of_c[None, :], 0.0).to(tl.float32)
    if tail_ptr is not None:
        of_tail = tl.expand_dims((t < 0) & (t > -WIDTH), 1) & of_c[None, :]
        place = (row * (WIDTH - 1) + t[:, None] + WIDTH - 1) * channels + c[None, :]
        x += tl.load(tail_ptr + place, of_tail, 0.0).to(tl.float32)
    return x


@triton.jit
def _token(
    x_ptr: tl.tensor, tail_ptr: tl.tensor, row: tl.tensor, t: tl.tensor, c: tl.tensor, of_c: tl.tensor, length: int,
    channels: int, x_row: int, x_token: int, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `_input`, of one token."""
    x = tl.load(x_ptr + row * x_row + t.to(tl.int64) * x_token + c, of_c & (t >= 0) & (t < length), 0.0)
    x = x.to(tl.float32)
    if tail_ptr is not None:
        of_tail = of_c & (t < 0) & (t > -WIDTH)
        x += tl.load(tail_ptr + (row * (WIDTH - 1) + t + WIDTH - 1) * channels + c, of_tail, 0.0).to(tl.float32)
    return x


@triton.jit
def _same(documents_ptr: tl.tensor, row: tl.tensor, t: tl.tensor, other: tl.tensor, length: int) -> tl.tensor:
    """Whether two tiles of tokens are of the same documents, the tail's being of the row's first."""
    places = documents_ptr + row * length
    document = tl.load(places + tl.maximum(t, 0), t < length, 0)
    return document == tl.load(places + tl.maximum(other, 0), other < length, 0)


@triton.jit
def _sum_of_taps(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, tail_ptr: tl.tensor, documents_ptr: tl.tensor,
    row: tl.tensor, t: tl.tensor, c: tl.tensor, of_c: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    sum_ = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        reached = t - (WIDTH - 1) + tap
        x = _input(x_ptr, tail_ptr, row, reached, c, of_c, length, channels, x_row, x_token, WIDTH)
        if documents_ptr is not None:
            x = tl.where(tl.expand_dims(_same(documents_ptr, row, reached, t, length), 1), x, 0.0)
        sum_ += tl.load(weight_ptr + tap * channels + c, of_c, 0.0)[None, :] * x
    if bias_ptr is not None:
        sum_ += tl.load(bias_ptr + c, of_c, 0.0)[None, :]
    return sum_


@triton.jit
def _sigmoid(v: tl.tensor) -> tl.tensor:
    return 1 / (1 + tl.exp(-v))


@triton.jit
def _silu_slope(v: tl.tensor) -> tl.tensor:
    gate = _sigmoid(v)
    return gate * (1 + v * (1 - gate))


@triton.jit
def _forward(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, tail_ptr: tl.tensor, documents_ptr: tl.tensor,
    length: int, channels: int, x_row: int, x_token: int, y_ptr: tl.tensor, y_row: int, y_token: int,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    of_c = c < channels
    y = _sum_of_taps(
        x_ptr, weight_ptr, bias_ptr, tail_ptr, documents_ptr, row, t, c, of_c, length, channels, x_row, x_token,
        WIDTH, TOKENS, CHANNELS,
    )  # fmt: skip
    if ACTIVATION:
        y *= _sigmoid(y)
    place = row * y_row + t.to(tl.int64)[:, None] * y_token + c[None, :]
    tl.store(y_ptr + place, y, (t < length)[:, None] & of_c[None, :])


# One long loop: the inputs of the last W tokens and the gradients of as many stay in the registers of the thread.
@triton.jit
def _backward(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, tail_ptr: tl.tensor, documents_ptr: tl.tensor,
    length: int, channels: int, x_row: int, x_token: int, grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int,
    grad_x_ptr: tl.tensor, grad_x_row: int, grad_x_token: int, grad_tail_ptr: tl.tensor, sums_ptr: tl.tensor,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tile * TOKENS - (WIDTH - 1)  # of the tile's tokens, which go from the tail's first to the row's last
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    of_c = c < channels
    zero = tl.zeros((CHANNELS,), tl.float32)
    taps, x, grad_x, of_taps, of_bias = (), (), (), (), zero
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + tap * channels + c, of_c, 0.0),)
        grad_x, of_taps = grad_x + (zero,), of_taps + (zero,)
    for tap in tl.static_range(WIDTH - 1):
        reached = first - (WIDTH - 1) + tap
        x = x + (_token(x_ptr, tail_ptr, row, reached, c, of_c, length, channels, x_row, x_token, WIDTH),)
    bias = zero
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, of_c, 0.0)
    for step in range(0, TOKENS + WIDTH - 1):
        t, begin = first + step, first + step - (WIDTH - 1)
        inputs = x + (_token(x_ptr, tail_ptr, row, t, c, of_c, length, channels, x_row, x_token, WIDTH),)
        seen, sum_ = (), bias
        for tap in tl.static_range(WIDTH):
            input_ = inputs[tap]
            if documents_ptr is not None:
                input_ = tl.where(_same(documents_ptr, row, begin + tap, t, length), input_, 0.0)
            seen, sum_ = seen + (input_,), sum_ + taps[tap] * input_
        of_t = (t >= 0) & (t < length) & of_c
        grad = tl.load(grad_y_ptr + row * grad_y_row + t.to(tl.int64) * grad_y_token + c, of_t, 0.0).to(tl.float32)
        if ACTIVATION:
            grad *= _silu_slope(sum_)
        own = tl.where(step < TOKENS, grad, 0.0)  # what follows the tile is another program's
        of_bias += own
        next_x, next_grad_x, next_of_taps = (), (), ()
        for tap in tl.static_range(WIDTH):
            next_of_taps = next_of_taps + (of_taps[tap] + own * seen[tap],)
            given = grad
            if documents_ptr is not None:
                given = tl.where(_same(documents_ptr, row, begin + tap, t, length), grad, 0.0)
            next_grad_x = next_grad_x + (grad_x[tap] + taps[tap] * given,)
        # `begin` is reached by no later token
        done, finished = of_c & (step >= WIDTH - 1), next_grad_x[0]  # pyrefly: ignore[bad-index]
        place = row * grad_x_row + begin.to(tl.int64) * grad_x_token + c
        tl.store(grad_x_ptr + place, finished, done & (begin >= 0) & (begin < length))
        if grad_tail_ptr is not None:
            place = (row * (WIDTH - 1) + begin + WIDTH - 1) * channels + c
            tl.store(grad_tail_ptr + place, finished, done & (begin < 0))
        grad_x = ()
        for tap in tl.static_range(1, WIDTH):
            next_x, grad_x = next_x + (inputs[tap],), grad_x + (next_grad_x[tap],)
        x, grad_x, of_taps = next_x, grad_x + (zero,), next_of_taps
    sums = sums_ptr + (row * tl.num_programs(0) + tile) * (WIDTH + 1) * channels + c
    for tap in tl.static_range(WIDTH):
        tl.store(sums + tap * channels, of_taps[tap], of_c)
    tl.store(sums + WIDTH * channels, of_bias, of_c)
