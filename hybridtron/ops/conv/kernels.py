"""The short causal convolution in Triton, forward and backward; `reference.py` has the equations.

A program computes a tile: some tokens by some channels in a row. Threads do not exchange data.

The forward kernel loads the inputs of each tap separately, so every input is loaded W times; all but the first load
come from the cache. The backward kernel loops over the tile's tokens and the W - 1 tokens after the tile, because the
gradients of these W - 1 tokens also reach the tile's inputs. It keeps the last W inputs and gradients in registers, and
recomputes the sum over taps, since SiLU's derivative needs the sum.

For the gradients of weight and bias, each tile stores partial sums, which a third kernel adds up. No kernel uses
atomics, so results are deterministic. float64 and widths above 8 are not supported. The first two kernels were checked
on an H200 (benchmarks/gpu.md), when torch still added up the partial sums; the third kernel has run on no GPU yet.

Legend: B rows (sequences in the batch), L tokens per row, C channels, W width (number of taps), T = W - 1 tail tokens
(the last inputs before the row), Q token tiles. In kernels, t is a token's index, negative for tail tokens; c is a
channel; the mask `of_c` marks channels that exist.
"""

# ruff: noqa: RUF005 (in Triton, tuples can be concatenated with +, but not unpacked)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import ConvInputs
from hybridtron.ops.kernel_launch import ceil_div, empty_in_order, last_side_by_side, launch, strided

TOKENS = 32  # per program of the forward kernel
CHANNELS = 64  # per program of the forward kernel
WARPS = 8  # of the forward kernel; the backward kernel has one warp per program
WALK_TOKENS = 64  # per program of the backward kernel
WALK_CHANNELS = 128  # per program of the backward kernel
SUM_TILES = 64  # token tiles whose partial sums a program of the third kernel loads at a time
SUM_CHANNELS = 32  # per program of the third kernel
SUM_WARPS = 8  # of the third kernel


@dataclass(frozen=True)
class ConvRow:
    """The op's inputs as the kernels read them: x's channels are contiguous, and the tail has x's dtype."""

    x_BLC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None
    tail_BTC: Tensor | None
    documents_BL: Tensor | None
    activation: bool

    @staticmethod
    def of(inputs: ConvInputs) -> ConvRow:
        x_BLC, weight_CW, bias_C, tail_BTC, documents_BL, activation, _ = inputs
        return ConvRow(
            last_side_by_side(x_BLC),
            weight_CW.contiguous(),
            None if bias_C is None else bias_C.contiguous(),
            None if tail_BTC is None else tail_BTC.to(x_BLC.dtype).contiguous(),
            None if documents_BL is None else documents_BL.contiguous(),
            activation,
        )

    def arguments(self) -> tuple[Any, ...]:
        """Return the first arguments of the two larger kernels: tensors, length, channels, and x's strides."""
        tensors = (self.x_BLC, self.weight_CW, self.bias_C, self.tail_BTC, self.documents_BL)
        return *tensors, *self.x_BLC.shape[1:], *self.x_BLC.stride()[:2]

    def grid(self, positions: int, tokens: int, width: int) -> tuple[int, int, int]:
        """Return the grid for tiles of `tokens` tokens by `width` channels that cover `positions` tokens per row.

        Token tiles are on the first axis, because CUDA limits the other axes to 65,535.
        """
        rows, _, channels = self.x_BLC.shape
        return ceil_div(positions, tokens), ceil_div(channels, width), rows


def causal_conv(inputs: ConvInputs) -> Tensor:
    return _TritonConv.apply(*inputs)


class _TritonConv(torch.autograd.Function):
    """Autograd function around the kernels. It saves only the inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        inputs = ConvInputs(*fields)
        ctx.save_for_backward(*inputs[:5])
        ctx.activation = inputs.activation
        return forward(ConvRow.of(inputs), inputs.row_major)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Any, ...] = ctx.saved_tensors
        inputs = ConvInputs(*tensors, activation=ctx.activation)
        grads = backward(ConvRow.of(inputs), grad_y_BLC)
        if inputs.tail_BTC is not None and grads.tail_BTC is not None:
            grads = grads._replace(tail_BTC=grads.tail_BTC.to(inputs.tail_BTC.dtype))
        return *grads[:4], None, None, None


def forward(row: ConvRow, row_major: bool = False) -> Tensor:
    """Return y, contiguous if `row_major`, else in x's memory order."""
    if row_major:
        y_BLC = row.x_BLC.new_empty(row.x_BLC.shape)
    else:
        y_BLC = empty_in_order(row.x_BLC)
    grid = row.grid(row.x_BLC.shape[1], TOKENS, CHANNELS)
    launch(
        _forward, grid, *row.arguments(), *strided(y_BLC),
        row.activation, row.weight_CW.shape[1], TOKENS, CHANNELS, warps=WARPS,
    )  # fmt: skip
    return y_BLC


def backward(row: ConvRow, grad_y_BLC: Tensor) -> ConvInputs:
    """Return the gradients as `ConvInputs`, each in the field of its input, in the dtype of the input in `row`."""
    grad_y_BLC = last_side_by_side(grad_y_BLC)
    channels, width = row.weight_CW.shape
    grid = row.grid(row.x_BLC.shape[1] + width - 1, WALK_TOKENS, WALK_CHANNELS)
    grad_x_BLC = empty_in_order(row.x_BLC)
    grad_tail_BTC = None if row.tail_BTC is None else torch.empty_like(row.tail_BTC)
    tiles = grid[2] * grid[0]  # over all rows
    sums_QWC = row.weight_CW.new_empty(tiles, width + 1, channels, dtype=torch.float32)  # W taps, then the bias
    launch(
        _backward, grid, *row.arguments(), *strided(grad_y_BLC, grad_x_BLC),
        grad_tail_BTC, sums_QWC, row.activation, width, WALK_TOKENS, WALK_CHANNELS, warps=1,
    )  # fmt: skip
    grad_weight_CW = torch.empty_like(row.weight_CW)
    grad_bias_C = None if row.bias_C is None else torch.empty_like(row.bias_C)
    sums = width if grad_bias_C is None else width + 1
    launch(
        _parameter_gradients, (ceil_div(channels, SUM_CHANNELS), sums), sums_QWC, tiles, channels, grad_weight_CW,
        grad_bias_C, width, SUM_TILES, SUM_CHANNELS, warps=SUM_WARPS,
    )  # fmt: skip
    return ConvInputs(grad_x_BLC, grad_weight_CW, grad_bias_C, grad_tail_BTC)


@triton.jit
def _input(
    x_ptr: tl.tensor, tail_ptr: tl.tensor, row: tl.tensor, t: tl.tensor, c: tl.tensor, of_c: tl.tensor, length: int,
    channels: int, x_row: int, x_token: int, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load x for the tokens t, in fp32; tokens before the row are loaded from the tail, or are 0 without a tail."""
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
    """Load x for one token t, in fp32; a token before the row is loaded from the tail, or is 0 without a tail."""
    x = tl.load(x_ptr + row * x_row + t.to(tl.int64) * x_token + c, of_c & (t >= 0) & (t < length), 0.0)
    x = x.to(tl.float32)
    if tail_ptr is not None:
        of_tail = of_c & (t < 0) & (t > -WIDTH)
        x += tl.load(tail_ptr + (row * (WIDTH - 1) + t + WIDTH - 1) * channels + c, of_tail, 0.0).to(tl.float32)
    return x


@triton.jit
def _same(documents_ptr: tl.tensor, row: tl.tensor, t: tl.tensor, other: tl.tensor, length: int) -> tl.tensor:
    """Return True where tokens t and `other` are in the same document.

    Tail tokens belong to the row's first document.
    """
    places = documents_ptr + row * length
    document = tl.load(places + tl.maximum(t, 0), t < length, 0)
    return document == tl.load(places + tl.maximum(other, 0), other < length, 0)


@triton.jit
def _sum_of_taps(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, tail_ptr: tl.tensor, documents_ptr: tl.tensor,
    row: tl.tensor, t: tl.tensor, c: tl.tensor, of_c: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the convolution before SiLU, as a tile (TOKENS, CHANNELS) in fp32."""
    sum_ = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        reached = t - (WIDTH - 1) + tap
        x = _input(x_ptr, tail_ptr, row, reached, c, of_c, length, channels, x_row, x_token, WIDTH)
        if documents_ptr is not None:
            x = tl.where(tl.expand_dims(_same(documents_ptr, row, reached, t, length), 1), x, 0.0)
        sum_ += tl.load(weight_ptr + c * WIDTH + tap, of_c, 0.0).to(tl.float32)[None, :] * x
    if bias_ptr is not None:
        sum_ += tl.load(bias_ptr + c, of_c, 0.0).to(tl.float32)[None, :]
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
    """Store y for a tile of TOKENS tokens by CHANNELS channels. Grid: (token tiles, channel tiles, rows)."""
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


@triton.jit
def _backward(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, tail_ptr: tl.tensor, documents_ptr: tl.tensor,
    length: int, channels: int, x_row: int, x_token: int, grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int,
    grad_x_ptr: tl.tensor, grad_x_row: int, grad_x_token: int, grad_tail_ptr: tl.tensor, sums_ptr: tl.tensor,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of a tile's inputs (row or tail), and the tile's partial sums for weight and bias.

    Grid: (token tiles, channel tiles, rows). The tiles cover tail and row. The kernel is one long loop over tokens,
    since registers carry the inputs and gradients of the last W tokens from one iteration to the next.
    """
    tile = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    first = tile * TOKENS - (WIDTH - 1)  # the tile's first token; negative for tail tokens
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    of_c = c < channels
    zero = tl.zeros((CHANNELS,), tl.float32)
    taps = ()
    x = ()
    grad_x = ()
    of_taps = ()
    of_bias = zero
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(weight_ptr + c * WIDTH + tap, of_c, 0.0).to(tl.float32),)
        grad_x = grad_x + (zero,)
        of_taps = of_taps + (zero,)
    for tap in tl.static_range(WIDTH - 1):
        reached = first - (WIDTH - 1) + tap
        x = x + (_token(x_ptr, tail_ptr, row, reached, c, of_c, length, channels, x_row, x_token, WIDTH),)
    bias = zero
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, of_c, 0.0).to(tl.float32)
    for step in range(0, TOKENS + WIDTH - 1):
        t = first + step
        begin = t - (WIDTH - 1)
        inputs = x + (_token(x_ptr, tail_ptr, row, t, c, of_c, length, channels, x_row, x_token, WIDTH),)
        seen = ()
        sum_ = bias
        for tap in tl.static_range(WIDTH):
            input_ = inputs[tap]
            if documents_ptr is not None:
                input_ = tl.where(_same(documents_ptr, row, begin + tap, t, length), input_, 0.0)
            seen = seen + (input_,)
            sum_ = sum_ + taps[tap] * input_
        of_t = (t >= 0) & (t < length) & of_c
        grad = tl.load(grad_y_ptr + row * grad_y_row + t.to(tl.int64) * grad_y_token + c, of_t, 0.0).to(tl.float32)
        if ACTIVATION:
            grad *= _silu_slope(sum_)
        in_tile = tl.where(step < TOKENS, grad, 0.0)  # the sums of later tokens are added by the next tile's program
        of_bias += in_tile
        next_x = ()
        next_grad_x = ()
        next_of_taps = ()
        for tap in tl.static_range(WIDTH):
            next_of_taps = next_of_taps + (of_taps[tap] + in_tile * seen[tap],)
            passed = grad
            if documents_ptr is not None:
                passed = tl.where(_same(documents_ptr, row, begin + tap, t, length), grad, 0.0)
            next_grad_x = next_grad_x + (grad_x[tap] + taps[tap] * passed,)
        # the gradient of the input at `begin` is complete, since no later token reads this input
        done = of_c & (step >= WIDTH - 1)
        finished = next_grad_x[0]  # pyrefly: ignore[bad-index]
        place = row * grad_x_row + begin.to(tl.int64) * grad_x_token + c
        tl.store(grad_x_ptr + place, finished, done & (begin >= 0) & (begin < length))
        if grad_tail_ptr is not None:
            place = (row * (WIDTH - 1) + begin + WIDTH - 1) * channels + c
            tl.store(grad_tail_ptr + place, finished, done & (begin < 0))
        grad_x = ()
        for tap in tl.static_range(1, WIDTH):
            next_x = next_x + (inputs[tap],)
            grad_x = grad_x + (next_grad_x[tap],)
        x = next_x
        grad_x = grad_x + (zero,)
        of_taps = next_of_taps
    sums = sums_ptr + (row * tl.num_programs(0) + tile) * (WIDTH + 1) * channels + c
    for tap in tl.static_range(WIDTH):
        tl.store(sums + tap * channels, of_taps[tap], of_c)
    tl.store(sums + WIDTH * channels, of_bias, of_c)


@triton.jit
def _parameter_gradients(
    sums_ptr: tl.tensor, tiles: int, channels: int, grad_weight_ptr: tl.tensor, grad_bias_ptr: tl.tensor,
    WIDTH: tl.constexpr, TILES: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradient of one tap, or of the bias, for CHANNELS channels: the sum over all token tiles.

    Grid: (channel tiles, W taps), or (channel tiles, W taps + 1) with a bias.
    """
    tap = tl.program_id(1)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    of_c = c < channels
    sums = tl.zeros((TILES, CHANNELS), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        place = (tile.to(tl.int64)[:, None] * (WIDTH + 1) + tap) * channels + c[None, :]
        sums += tl.load(sums_ptr + place, (tile < tiles)[:, None] & of_c[None, :], 0.0)
    grad = tl.sum(sums, 0)
    if tap < WIDTH:
        tl.store(grad_weight_ptr + c * WIDTH + tap, grad, of_c)
    elif grad_bias_ptr is not None:
        tl.store(grad_bias_ptr + c, grad, of_c)
