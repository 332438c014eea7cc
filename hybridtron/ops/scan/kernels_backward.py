"""The selective scan of Mamba-1 in Triton: the op, and its backward pass.

With R_t the gradient of the state after token t that comes from later tokens, and g_t that of y_t before the gate:

    G_t = C_t g_t + R_t          R_{t-1} = exp(delta_t A) G_t

    grad B_t = sum over channels of G_t delta_t x_t      grad C_t = sum over channels of h_t g_t
    grad of the exponent delta_t A = exp(delta_t A) h_{t-1} G_t

A row is cut into tiles of a few tokens, whose states fit in registers. The states before all tiles are walked out
from those before the chunks, which the forward pass kept; the gradients after all tiles come as the forward pass's
states do, last tile first. Then each tile goes through one kernel with both, one n after another.

Everything that is summed over rows, tokens or channels of several programs is written as partial sums, which torch adds
up in a fixed order: no atomic addition, the same bits every time. Nothing has a value for every token, channel and n.

Nothing that is not finite crosses the border of a document. Right on an H200 (benchmarks/gpu.md).

A thread of the last kernel has one channel of a tile's tokens, in tuples with a value for each. In a tensor of tokens
and channels, the compiler would share the tokens out to the warps of a program, and each sum over time would go through
shared memory. A tile's tokens are summed over a warp's channels together: neighbours exchange halves of their tokens
until each has one, by 16 shuffles for 16 tokens, where a sum for each token takes 80.

Legend: as in `selective_scan`; Q tiles, F blocks of channels.
"""

# ruff: noqa: RUF005 (Triton joins tuples, and unpacks none)
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_launch import empty_in_order, last_side_by_side, launch
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

TILE = 16  # tokens of which all states exist at a time; they divide a chunk
CHANNELS = 32  # of one warp: they leave one partial sum of the gradients of B and C
REGISTERS = 168  # of a thread: 12 warps fit on a multiprocessor, and nothing is spilled


def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """States are (B, N, E) for the kernels: channels side by side in memory."""
    y_BLE, last_BNE = _TritonScan.apply(*inputs)
    return y_BLE, last_BNE.mT


class _TritonScan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

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
        inputs, states_BKNE = ScanInputs(*saved[:-1]), saved[-1]
        found = backward(ScanRow.of(inputs), states_BKNE, grad_y_BLE, grad_last_BNE)
        pairs = zip(found[:-1], inputs[:-1], strict=True)
        return *(None if t is None or g is None else g.to(t.dtype) for g, t in pairs), None


def backward(row: ScanRow, states_BKNE: Tensor, grad_y_BLE: Tensor, grad_last_BNE: Tensor) -> ScanInputs:
    """From the gradients of y and of the state after the last token those of the op's inputs, in their places.

    They are of the types that the kernels compute in: fp32 where they are sums.
    """
    grad_y_BLE, grad_last_BNE = last_side_by_side(grad_y_BLE), grad_last_BNE.float().contiguous()
    before_BQNE, elapsed_BQE = row.per_part(TILE)
    grad_z_BLE = None if row.z_BLE is None else empty_in_order(row.z_BLE)
    retrace(row, states_BKNE, None, grad_y_BLE, grad_z_BLE, (before_BQNE, TILE))
    after_BQNE = torch.empty_like(before_BQNE)
    tile = row.tile()
    launch(
        _walk_back, row.grid(CHUNK, tile[2]), *row.arguments(), grad_y_BLE, *grad_y_BLE.stride()[:2],
        after_BQNE, elapsed_BQE, CHUNK, TILE, *tile, warps=1,
    )  # fmt: skip
    grad_state_BNE = chain(row, after_BQNE, elapsed_BQE, grad_last_BNE, backwards=True)
    tiles = before_BQNE, after_BQNE, elapsed_BQE
    return _of_tiles(row, grad_y_BLE, *tiles, grad_z_BLE=grad_z_BLE, grad_state_BNE=grad_state_BNE)


def _of_tiles(
    row: ScanRow,
    grad_y_BLE: Tensor,
    before_BQNE: Tensor,
    after_BQNE: Tensor,
    elapsed_BQE: Tensor,
    grad_z_BLE: Tensor | None,
    grad_state_BNE: Tensor,
) -> ScanInputs:
    """`after` and `elapsed` are used up: the partial sums for A and dt_bias are written in their place."""
    rows, length, _, states = row.sizes
    grid = row.grid(TILE, CHANNELS)
    x, dt = empty_in_order(row.x_BLE), empty_in_order(row.dt_BLE)
    B_FBNL, C_FBNL = (row.D_E.new_empty(grid[1], rows, states, length) for _ in range(2))
    D_BQE = torch.empty_like(elapsed_BQE)
    # a tile's tokens side by side, and zeros where the last tile goes past the row's end; two of them are one load
    along = [F.pad(tensor.mT.float(), (0, -length % TILE)).contiguous() for tensor in (row.B_BLN, row.C_BLN)]
    pairs = [tensor.flatten().view(torch.int64) for tensor in along]
    launch(
        _gradients, grid, *row.arguments(), grad_y_BLE, *grad_y_BLE.stride()[:2], *pairs, before_BQNE, after_BQNE,
        x, *x.stride()[:2], dt, *dt.stride()[:2], B_FBNL, C_FBNL, D_BQE, elapsed_BQE,
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
    chunk, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    e = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, N_PADDED)
    of_e, of_n = e < channels, n < N
    tile, of_tile = n[:, None] * channels + e[None, :], of_n[:, None] & of_e[None, :]
    A = tl.load(A_ptr + tile, of_tile, 0.0)
    bias = tl.load(bias_ptr + e, of_e, 0.0)
    parts = tl.cdiv(length, TOKENS)
    for part in range(chunk * (CHUNK // TOKENS), tl.minimum((chunk + 1) * (CHUNK // TOKENS), parts)):
        tokens = tl.minimum(length - part * TOKENS, TOKENS)
        slot, at = row * parts + part, (part * TOKENS + tokens - 1).to(tl.int64)
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
    """Of two tokens next to each other, of which each asks for both, the compiler makes one load."""
    return (tl.load(pairs_ptr + t // 2) >> (32 * (t % 2))).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _halved(values: tl.tuple, lane: tl.tensor, BIT: tl.constexpr, HALF: tl.constexpr) -> Any:
    """Of each two values the first one for lanes without this bit, the second one for the others, of both lanes."""
    upper = (lane & BIT) != 0
    halves = ()
    for i in tl.static_range(HALF):
        given = tl.where(upper, values[2 * i], values[2 * i + 1])
        halves = halves + (tl.where(upper, values[2 * i + 1], values[2 * i]) + tl.gather(given, lane ^ BIT, 0),)
    return halves


@triton.jit
def _over_channels(
    values: tl.tuple, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The sum of each token's channels: lanes whose number ends in a token's hold parts of its sum at the end."""
    lane = tl.arange(0, CHANNELS)
    for level in tl.static_range(LEVELS):
        values = _halved(values, lane, 1 << level, TOKENS >> (level + 1))
    (of_token,) = values
    return tl.sum(tl.reshape(of_token, (CHANNELS // TOKENS, TOKENS)), 0)


# One long function: what it adds up over n stays in the registers of the thread that has the channel.
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
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot, at = row * tl.num_programs(0) + part, part.to(tl.int64) * TOKENS
    e, step = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, TOKENS)
    of_e, left = e < channels, length - part * TOKENS  # tokens of the row from here on
    bias = tl.load(bias_ptr + e, of_e, 0.0)
    x_place = x_ptr + row * x_row + at * x_token + e
    dt_place = dt_ptr + row * dt_row + at * dt_token + e
    z_place = x_place if z_ptr is None else z_ptr + row * z_row + at * z_token + e
    grad_y_place = grad_y_ptr + row * grad_y_row + at * grad_y_token + e
    zero = tl.zeros((CHANNELS,), tl.float32)
    # 0, which the compiler does not know: it copies an address of the whole warp into registers for every load
    own = (e >= channels + CHANNELS).to(tl.int32)
    # of each token; `grad_log2`: of delta, by way of exp2(delta A)
    delta, gain, grad_y, grad_gain, grad_log2 = (), (), (), (), ()
    if starts_ptr is not None:  # a bit for each token: registers are scarce
        starts = tl.load(starts_ptr + row * length + at + step, step < left, 0)
        borders = tl.sum(tl.where(starts != 0, 1 << step, 0), 0)
    for t in tl.static_range(TOKENS):
        there = of_e & (t < left)
        dt = tl.load(dt_place + t * dt_token, there, 0.0).to(tl.float32)
        x = tl.load(x_place + t * x_token, there, 0.0).to(tl.float32)
        grad = tl.load(grad_y_place + t * grad_y_token, there, 0.0).to(tl.float32)
        if z_ptr is not None:
            z = tl.load(z_place + t * z_token, there, 0.0).to(tl.float32)
            grad *= z * sigmoid(z)
        waited = tl.where(t < left, softplus(dt + bias), 0.0)  # past the row's end: nothing decays
        delta, gain, grad_y = delta + (waited,), gain + (waited * x,), grad_y + (grad,)
        grad_gain, grad_log2 = grad_gain + (zero,), grad_log2 + (zero,)
    for n in range(0, N):
        pairs = ((row * N + n) * tl.num_programs(0) + part) * (TOKENS // 2) + own
        state = (slot * N + n) * channels + e
        sums = ((tl.program_id(1).to(tl.int64) * tl.num_programs(2) + row) * N + n) * length + at + step
        A = tl.load(A_ptr + n * channels + e, of_e, 0.0)
        h = tl.load(before_ptr + state, of_e, 0.0)
        decay, kept, of_C, of_B = (), (), (), ()
        for t in tl.static_range(TOKENS):
            factor = tl.exp2(delta[t] * A)
            of_past = factor * h
            if starts_ptr is not None:
                of_past = tl.where((borders >> t) & 1 != 0, 0.0, of_past)
            h = of_past + gain[t] * _of_pairs(B_pairs_ptr + pairs, t)
            decay, kept = decay + (factor,), kept + (of_past,)
            of_C = of_C + (h * grad_y[t],)
        tl.store(grad_C_ptr + sums, _over_channels(of_C, TOKENS, CHANNELS, LEVELS), step < left)

        later = tl.load(after_ptr + state, of_e, 0.0)
        of_A = zero
        new_gain, new_log2 = (), ()
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
        grad_gain, grad_log2 = new_gain, new_log2
        tl.store(grad_B_ptr + sums, _over_channels(of_B, TOKENS, CHANNELS, LEVELS), step < left)
        tl.store(after_ptr + state, of_A, of_e)

    # Read again, since registers are scarcer than the cache; by sums of another order, or the addresses would be kept.
    D = tl.load(D_ptr + e, of_e, 0.0)
    of_D, of_bias = zero, zero
    grad_x_place = grad_x_ptr + row * grad_x_row + at * grad_x_token + e
    grad_dt_place = grad_dt_ptr + row * grad_dt_row + at * grad_dt_token + e
    for t in tl.static_range(TOKENS):
        there = of_e & (t < left)
        x = tl.load(x_ptr + row * x_row + (at + t) * x_token + e, there, 0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_row + (at + t) * dt_token + e, there, 0.0).to(tl.float32)
        grad_dt = (grad_gain[t] * x + 0.6931471805599453 * grad_log2[t]) * sigmoid(dt + bias)
        tl.store(grad_dt_place + t * grad_dt_token, grad_dt, there)
        tl.store(grad_x_place + t * grad_x_token, grad_gain[t] * delta[t] + D * grad_y[t], there)
        of_D += grad_y[t] * x
        of_bias += tl.where(t < left, grad_dt, 0.0)
    tl.store(grad_D_ptr + slot * channels + e, of_D, of_e)
    tl.store(grad_bias_ptr + slot * channels + e, of_bias, of_e)
