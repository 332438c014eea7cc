"""Triton kernels for Mamba-1's selective scan: the backward pass, and the op with both passes.

The forward pass (`kernels`) computes, with the state h, the input x and the gate z:

    delta_t = softplus(dt_t + dt_bias),   h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t
    y_t = (C_t h_t + D x_t) silu(z_t)

g_t is the gradient of C_t h_t + D x_t, G_t is the gradient of h_t, and R_t is the part of G_t from later tokens:

    G_t = C_t g_t + R_t,                                   R_{t-1} = exp(delta_t A) G_t
    grad B_t = sum over channels of G_t delta_t x_t,       grad C_t = sum over channels of h_t g_t
    grad (delta_t A) = exp(delta_t A) h_{t-1} G_t

The gradients of x, dt, A, D and dt_bias follow by the chain rule. A row (a sequence in the batch) is divided into
128-token chunks, and each chunk into 16-token tiles. The forward pass has saved the state before each chunk. The
kernels run in this order:

    retrace           scans each chunk from its saved state; stores the state before each tile, and z's gradient
    _walk_back        stores, for each tile, the tile's own contribution to the state gradient before the tile
    chain             loops from the last tile to the first, and adds up the contributions; stores the state gradient
                      after each tile
    _gradients        stores the other inputs' gradients, tile by tile

A sum over rows, tokens or channels that crosses programs is stored as one partial sum for each program, and torch adds
the partial sums. No kernel uses atomics, so results are deterministic. No tensor has an entry for every combination of
token, channel and state entry. An infinite or NaN value in one document does not reach another document. The kernels
were checked on an H200 (benchmarks/gpu.md).

In `_gradients` a thread computes one channel at all tokens in a tile, and holds tuples with one value per token. A
tensor (tokens by channels) is not used, because the compiler would distribute its tokens over threads, and sums over
tokens would need shared memory. The sums over a warp's 32 channels are computed for all tokens in the tile together. In
each round, pairs of lanes (a warp's threads) exchange and add the values for half their tokens, until each lane has the
value for a single token. This takes 16 shuffles for 16 tokens, while a separate sum for each token would take 80.

Legend: B rows, L tokens, E inner channels, N state entries per channel, n an index on this axis, K chunks, Q tiles, F
channel blocks. States are stored as (N, E), so channels are contiguous in memory.
"""

# ruff: noqa: RUF005 (in Triton, tuples can be concatenated with +, but not unpacked)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import empty_in_order, last_side_by_side, launch, strided
from hybridtron.ops.scan.kernels import (
    CHUNK,
    ScanRow,
    chain,
    forward,
    retrace,
    sigmoid,
    softplus,
)
from hybridtron.ops.scan.reference import ScanInputs

TILE = 16  # tokens per tile; a divisor of CHUNK
CHANNELS = 32  # channels per warp in `_gradients`; a warp stores its channels' partial sums of B's and C's gradients
REGISTERS = 168  # registers per thread in `_gradients`: 12 warps fit on a multiprocessor, and nothing is spilled


def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """Return y, and the state after the last token (B, E, N); the state is a view of a tensor (B, N, E)."""
    y_BLE, last_BNE = _TritonScan.apply(*inputs)
    return y_BLE, last_BNE.mT


class _TritonScan(torch.autograd.Function):
    """Autograd function that saves the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> tuple[Tensor, Tensor]:
        inputs = ScanInputs(*fields)
        y_BLE, last_BNE, states_BKNE = forward(ScanRow.of(inputs), inputs.state_BEN)
        ctx.save_for_backward(*inputs, states_BKNE)
        return y_BLE, last_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Any, ...] = ctx.saved_tensors
        inputs = ScanInputs(*saved[:-1])
        states_BKNE = saved[-1]
        grads = backward(ScanRow.of(inputs), states_BKNE, grad_y_BLE, grad_last_BNE)
        pairs = zip(grads[:-1], inputs[:-1], strict=True)
        return *(None if t is None or g is None else g.to(t.dtype) for g, t in pairs), None


def backward(row: ScanRow, states_BKNE: Tensor, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> ScanInputs:
    """Return each input's gradient in that input's field; the field for document numbers is None.

    The gradients of x, dt and z have these inputs' dtypes. All other gradients are fp32.
    """
    grad_y_BLE = last_side_by_side(grad_y_BLE)
    grad_last_BNE = grad_last_BNE.float().contiguous()
    before_BQNE, elapsed_BQE = row.per_part(TILE)
    grad_z_BLE = None if row.z_BLE is None else empty_in_order(row.z_BLE)
    retrace(row, states_BKNE, None, grad_y_BLE, grad_z_BLE, (before_BQNE, TILE))
    after_BQNE = torch.empty_like(before_BQNE)
    tile = row.tile()
    launch(
        _walk_back, row.grid(CHUNK, tile[2]), *row.arguments(), *strided(grad_y_BLE),
        after_BQNE, elapsed_BQE, CHUNK, TILE, *tile, warps=1,
    )  # fmt: skip
    grad_state_BNE = chain(row, after_BQNE, elapsed_BQE, grad_last_BNE, backwards=True)
    return _of_tiles(
        row,
        grad_y_BLE,
        before_BQNE,
        after_BQNE,
        elapsed_BQE=elapsed_BQE,
        grad_z_BLE=grad_z_BLE,
        grad_state_BNE=grad_state_BNE,
    )


def _of_tiles(
    row: ScanRow,
    grad_y_BLE: Tensor,
    before_BQNE: Tensor,
    after_BQNE: Tensor,
    elapsed_BQE: Tensor,
    grad_z_BLE: Tensor | None,
    grad_state_BNE: Tensor,
) -> ScanInputs:
    """Return the inputs' gradients, given the states before all tiles and the state gradients after all tiles.

    To save memory, the kernel overwrites `after` with partial sums for A's gradient, and `elapsed` with partial sums
    for dt_bias's gradient.
    """
    rows, length, _, states = row.sizes
    grid = row.grid(TILE, CHANNELS)
    x = empty_in_order(row.x_BLE)
    dt = empty_in_order(row.dt_BLE)
    B_FBNL, C_FBNL = (row.D_E.new_empty(grid[1], rows, states, length) for _ in range(2))
    D_BQE = torch.empty_like(elapsed_BQE)
    # The inputs B and C are transposed, and padded to full tiles. The kernel reads the fp32 numbers of two consecutive
    # tokens as one 64-bit integer.
    along = [F.pad(tensor.mT.float(), (0, -length % TILE)).contiguous() for tensor in (row.B_BLN, row.C_BLN)]
    pairs = [tensor.flatten().view(torch.int64) for tensor in along]
    launch(
        _gradients, grid, *row.arguments(), *strided(grad_y_BLE), *pairs, before_BQNE, after_BQNE,
        *strided(x, dt), B_FBNL, C_FBNL, D_BQE, elapsed_BQE,
        states, TILE, CHANNELS, TILE.bit_length() - 1, warps=1, registers=REGISTERS,
    )  # fmt: skip
    return ScanInputs(
        x_BLE=x,
        dt_BLE=dt,
        A_EN=after_BQNE.sum((0, 1)).mT,
        B_BLN=B_FBNL.sum(0).transpose(1, 2),
        C_BLN=C_FBNL.sum(0).transpose(1, 2),
        D_E=D_BQE.sum((0, 1)),
        dt_bias_E=elapsed_BQE.sum((0, 1)),
        z_BLE=grad_z_BLE,
        state_BEN=grad_state_BNE.mT,
    )


@triton.jit
def _walk_back(
    x_ptr: tl.tensor, dt_ptr: tl.tensor, B_ptr: tl.tensor, C_ptr: tl.tensor, z_ptr: tl.tensor, A_ptr: tl.tensor,
    D_ptr: tl.tensor, bias_ptr: tl.tensor, starts_ptr: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    dt_row: int, dt_token: int, B_row: int, B_token: int, C_row: int, C_token: int, z_row: int, z_token: int,
    grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, after_ptr: tl.tensor, elapsed_ptr: tl.tensor,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store two tensors for each tile: a gradient of the state before the tile, and delta's sum over the tile.

    The gradient contains only the contribution from the tile's own tokens, so it starts from zero after the tile's last
    token. If a document begins in the tile, the stored sum is minus infinity. Then no gradient from after the tile
    reaches the state before the tile. Grid: (chunks, blocks with CHANNELS channels, rows). A program is one warp, which
    holds a gradient (N_PADDED, CHANNELS), and loops over its chunk's tiles.
    """
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    e = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, N_PADDED)
    of_e = e < channels
    of_n = n < N
    tile = n[:, None] * channels + e[None, :]
    of_tile = of_n[:, None] & of_e[None, :]
    A = tl.load(A_ptr + tile, of_tile, 0.0)
    bias = tl.load(bias_ptr + e, of_e, 0.0)
    parts = tl.cdiv(length, TOKENS)
    for part in range(chunk * (CHUNK // TOKENS), tl.minimum((chunk + 1) * (CHUNK // TOKENS), parts)):
        tokens = tl.minimum(length - part * TOKENS, TOKENS)
        slot = row * parts + part
        at = (part * TOKENS + tokens - 1).to(tl.int64)
        grad_h = tl.zeros((N_PADDED, CHANNELS), tl.float32)
        elapsed = tl.zeros((CHANNELS,), tl.float32)
        for _ in range(0, tokens):
            grad_y = tl.load(grad_y_ptr + row * grad_y_row + at * grad_y_token + e, of_e, 0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * dt_row + at * dt_token + e, of_e, 0.0).to(tl.float32)
            C = tl.load(C_ptr + row * C_row + at * C_token + n, of_n, 0.0).to(tl.float32)
            if z_ptr is not None:
                z = tl.load(z_ptr + row * z_row + at * z_token + e, of_e, 0.0).to(tl.float32)
                grad_y *= z * sigmoid(z)
            delta = softplus(dt + bias)
            decay = tl.exp2(delta[None, :] * A)
            elapsed += delta
            if starts_ptr is not None:
                begins = tl.load(starts_ptr + row * length + at) != 0
                elapsed = tl.where(begins, float("-inf"), elapsed)
            grad_h = decay * (C[:, None] * grad_y[None, :] + grad_h)
            if starts_ptr is not None:
                grad_h = tl.where(begins, 0.0, grad_h)
            at -= 1
        tl.store(after_ptr + slot * N * channels + tile, grad_h, of_tile)
        tl.store(elapsed_ptr + slot * channels + e, elapsed, of_e)


@triton.jit
def _of_pairs(pairs_ptr: tl.tensor, t: tl.constexpr) -> tl.tensor:
    """Return token t's fp32 number, which is half a 64-bit integer; the compiler loads each integer only once."""
    return (tl.load(pairs_ptr + t // 2) >> (32 * (t % 2))).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _halved(values: tl.tuple, lane: tl.tensor, BIT: tl.constexpr, HALF: tl.constexpr) -> Any:
    """Add values over pairs of lanes whose indices differ in BIT; each lane keeps half the sums.

    A lane has 2 * HALF values, in pairs (first, second), and returns HALF sums. A lane whose index lacks BIT returns
    the sums of both lanes' first values. The other lane returns the sums of both lanes' second values.
    """
    upper = (lane & BIT) != 0
    halves = ()
    for i in tl.static_range(HALF):
        sent = tl.where(upper, values[2 * i], values[2 * i + 1])
        halves = halves + (tl.where(upper, values[2 * i + 1], values[2 * i]) + tl.gather(sent, lane ^ BIT, 0),)
    return halves


@triton.jit
def _over_channels(
    values: tl.tuple, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return each token's sum over the warp's channels; `values` has one entry for each token.

    LEVELS is log2(TOKENS). After LEVELS rounds, lane i holds a partial sum for token i modulo TOKENS. The last line
    adds a token's partial sums.
    """
    lane = tl.arange(0, CHANNELS)
    for level in tl.static_range(LEVELS):
        values = _halved(values, lane, 1 << level, TOKENS >> (level + 1))
    (of_token,) = values
    return tl.sum(tl.reshape(of_token, (CHANNELS // TOKENS, TOKENS)), 0)


@triton.jit
def _gradients(
    x_ptr: tl.tensor, dt_ptr: tl.tensor, B_ptr: tl.tensor, C_ptr: tl.tensor, z_ptr: tl.tensor, A_ptr: tl.tensor,
    D_ptr: tl.tensor, bias_ptr: tl.tensor, starts_ptr: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    dt_row: int, dt_token: int, B_row: int, B_token: int, C_row: int, C_token: int, z_row: int, z_token: int,
    grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, B_pairs_ptr: tl.tensor, C_pairs_ptr: tl.tensor,
    before_ptr: tl.tensor, after_ptr: tl.tensor, grad_x_ptr: tl.tensor, grad_x_row: int, grad_x_token: int,
    grad_dt_ptr: tl.tensor, grad_dt_row: int, grad_dt_token: int, grad_B_ptr: tl.tensor, grad_C_ptr: tl.tensor,
    grad_D_ptr: tl.tensor, grad_bias_ptr: tl.tensor, N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients of x and dt for one tile, and partial sums for the gradients of B, C, A, D and dt_bias.

    Grid: (tiles, blocks with CHANNELS channels, rows); one warp per program, one channel per thread. This is one long
    function, so that a channel's sums over n stay in its thread's registers.
    """
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot = row * tl.num_programs(0) + part
    at = part.to(tl.int64) * TOKENS
    e = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    step = tl.arange(0, TOKENS)
    of_e = e < channels
    left = length - part * TOKENS  # tokens from the tile's first token to the row's end
    bias = tl.load(bias_ptr + e, of_e, 0.0)
    x_place = x_ptr + row * x_row + at * x_token + e
    dt_place = dt_ptr + row * dt_row + at * dt_token + e
    z_place = x_place if z_ptr is None else z_ptr + row * z_row + at * z_token + e
    grad_y_place = grad_y_ptr + row * grad_y_row + at * grad_y_token + e
    zero = tl.zeros((CHANNELS,), tl.float32)
    # This is 0, but the compiler cannot know it. If the compiler knew that all threads of the warp read the same
    # address, it would add to each load an instruction that copies the address.
    zero_of_lane = (e >= channels + CHANNELS).to(tl.int32)
    # Tuples with one value per token (A includes the factor log2(e)):
    #   delta       delta_t
    #   gain        delta_t x_t
    #   grad_y      g_t, the gradient of C_t h_t + D x_t
    #   grad_gain   the gradient of gain
    #   grad_log2   the gradient of delta through exp2(delta A), divided by log(2)
    delta = ()
    gain = ()
    grad_y = ()
    grad_gain = ()
    grad_log2 = ()
    if starts_ptr is not None:  # one bit per token, since registers are scarce
        starts = tl.load(starts_ptr + row * length + at + step, step < left, 0)
        borders = tl.sum(tl.where(starts != 0, 1 << step, 0), 0)
    for t in tl.static_range(TOKENS):
        inside = of_e & (t < left)
        dt = tl.load(dt_place + t * dt_token, inside, 0.0).to(tl.float32)
        x = tl.load(x_place + t * x_token, inside, 0.0).to(tl.float32)
        grad = tl.load(grad_y_place + t * grad_y_token, inside, 0.0).to(tl.float32)
        if z_ptr is not None:
            z = tl.load(z_place + t * z_token, inside, 0.0).to(tl.float32)
            grad *= z * sigmoid(z)
        waited = tl.where(t < left, softplus(dt + bias), 0.0)  # 0 after the row's end: the state does not change there
        delta = delta + (waited,)
        gain = gain + (waited * x,)
        grad_y = grad_y + (grad,)
        grad_gain = grad_gain + (zero,)
        grad_log2 = grad_log2 + (zero,)
    for n in range(0, N):
        pairs = ((row * N + n) * tl.num_programs(0) + part) * (TOKENS // 2) + zero_of_lane
        state = (slot * N + n) * channels + e
        sums = ((tl.program_id(1).to(tl.int64) * tl.num_programs(2) + row) * N + n) * length + at + step
        A = tl.load(A_ptr + n * channels + e, of_e, 0.0)
        h = tl.load(before_ptr + state, of_e, 0.0)
        # Tuples with one value per token:
        #   decay   exp2(delta_t A)
        #   kept    decay times h_{t-1}; 0 where a document begins
        #   of_C    this channel's contribution to C's gradient
        #   of_B    this channel's contribution to B's gradient
        decay = ()
        kept = ()
        of_C = ()
        of_B = ()
        for t in tl.static_range(TOKENS):
            factor = tl.exp2(delta[t] * A)
            of_past = factor * h
            if starts_ptr is not None:
                of_past = tl.where((borders >> t) & 1 != 0, 0.0, of_past)
            h = of_past + gain[t] * _of_pairs(B_pairs_ptr + pairs, t)
            decay = decay + (factor,)
            kept = kept + (of_past,)
            of_C = of_C + (h * grad_y[t],)
        tl.store(grad_C_ptr + sums, _over_channels(of_C, TOKENS, CHANNELS, LEVELS), step < left)

        later = tl.load(after_ptr + state, of_e, 0.0)
        of_A = zero
        new_gain = ()
        new_log2 = ()
        for t in tl.static_range(TOKENS - 1, -1, -1):
            grad_h = _of_pairs(C_pairs_ptr + pairs, t) * grad_y[t] + later
            grad_exponent = kept[t] * grad_h
            of_A += delta[t] * grad_exponent
            new_gain = (grad_gain[t] + _of_pairs(B_pairs_ptr + pairs, t) * grad_h,) + new_gain
            new_log2 = (grad_log2[t] + A * grad_exponent,) + new_log2
            of_B = (gain[t] * grad_h,) + of_B
            later = decay[t] * grad_h
            if starts_ptr is not None:
                later = tl.where((borders >> t) & 1 != 0, 0.0, later)
        grad_gain = new_gain
        grad_log2 = new_log2
        tl.store(grad_B_ptr + sums, _over_channels(of_B, TOKENS, CHANNELS, LEVELS), step < left)
        tl.store(after_ptr + state, of_A, of_e)

    # x and dt are loaded again instead of kept, since registers are scarce. Their addresses are computed by other
    # expressions than above, so that the compiler does not keep the first addresses in registers.
    D = tl.load(D_ptr + e, of_e, 0.0)
    of_D = zero
    of_bias = zero
    grad_x_place = grad_x_ptr + row * grad_x_row + at * grad_x_token + e
    grad_dt_place = grad_dt_ptr + row * grad_dt_row + at * grad_dt_token + e
    for t in tl.static_range(TOKENS):
        inside = of_e & (t < left)
        x = tl.load(x_ptr + row * x_row + (at + t) * x_token + e, inside, 0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_row + (at + t) * dt_token + e, inside, 0.0).to(tl.float32)
        grad_dt = (grad_gain[t] * x + 0.6931471805599453 * grad_log2[t]) * sigmoid(dt + bias)
        tl.store(grad_dt_place + t * grad_dt_token, grad_dt, inside)
        tl.store(grad_x_place + t * grad_x_token, grad_gain[t] * delta[t] + D * grad_y[t], inside)
        of_D += grad_y[t] * x
        of_bias += tl.where(t < left, grad_dt, 0.0)
    tl.store(grad_D_ptr + slot * channels + e, of_D, of_e)
    tl.store(grad_bias_ptr + slot * channels + e, of_bias, of_e)
