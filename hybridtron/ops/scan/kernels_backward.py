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

Nothing that is not finite crosses the border of a document. Within a tile it adds nothing at all where documents are
distinguished, which costs fewer registers than keeping it on its side: the loss of its own document has shown it.
Unmeasured on a GPU.

Legend: as in `selective_scan`; Q tiles, F blocks of channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.kernel_cost import SCAN_CHANNELS as CHANNELS
from hybridtron.ops.kernel_cost import SCAN_TILE as TILE
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

WARPS = 4  # of 32 channels each: a thread has one channel, and TILE tokens of it in nearly all of its registers


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
    along = [tensor.mT.float().contiguous() for tensor in (row.B_BLN, row.C_BLN)]  # a tile's tokens side by side
    launch(
        _gradients, grid, *row.arguments(), grad_y_BLE, *grad_y_BLE.stride()[:2], *along, before_BQNE, after_BQNE,
        x, *x.stride()[:2], dt, *dt.stride()[:2], B_FBNL, C_FBNL, D_BQE, elapsed_BQE,
        states, TILE, CHANNELS, warps=WARPS,
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
def affine(
    decay: tl.tensor, added: tl.tensor, decay_before: tl.tensor, before: tl.tensor, next_decay: tl.tensor,
    next_added: tl.tensor, next_decay_before: tl.tensor, next_before: tl.tensor,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """`barred` for what is finite, which needs fewer registers."""
    return (
        decay * next_decay,
        next_decay * added + next_added,
        decay * next_decay_before,
        next_decay_before * added + next_before,
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


# One long loop over n: what it adds up over n stays in the registers, which are nearly all in use.
@triton.jit
def _gradients(
    x_ptr: tl.tensor, dt_ptr: tl.tensor, B_ptr: tl.tensor, C_ptr: tl.tensor, z_ptr: tl.tensor, A_ptr: tl.tensor,
    D_ptr: tl.tensor, bias_ptr: tl.tensor, starts_ptr: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    dt_row: int, dt_token: int, B_row: int, B_token: int, C_row: int, C_token: int, z_row: int, z_token: int,
    grad_y_ptr: tl.tensor, grad_y_row: int, grad_y_token: int, B_along_ptr: tl.tensor, C_along_ptr: tl.tensor,
    before_ptr: tl.tensor, after_ptr: tl.tensor, grad_x_ptr: tl.tensor, grad_x_row: int, grad_x_token: int,
    grad_dt_ptr: tl.tensor, grad_dt_row: int, grad_dt_token: int, grad_B_ptr: tl.tensor, grad_C_ptr: tl.tensor,
    grad_D_ptr: tl.tensor, grad_bias_ptr: tl.tensor, N: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot, at = row * tl.num_programs(0) + part, part.to(tl.int64) * TOKENS
    # One channel a thread: with more, the compiler would spread a channel's tokens over threads to have wider loads.
    e = tl.max_contiguous(tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), 1)
    step = tl.arange(0, TOKENS)
    of_e, of_t = e < channels, part * TOKENS + step < length
    of_tile = of_t[:, None] & of_e[None, :]
    x_place = x_ptr + row * x_row + at * x_token + (step * x_token)[:, None] + e[None, :]
    dt_place = dt_ptr + row * dt_row + at * dt_token + (step * dt_token)[:, None] + e[None, :]
    place = grad_y_ptr + row * grad_y_row + at * grad_y_token + (step * grad_y_token)[:, None] + e[None, :]
    bias = tl.load(bias_ptr + e, of_e, 0.0)[None, :]
    D = tl.load(D_ptr + e, of_e, 0.0)[None, :]
    dt = tl.load(dt_place, of_tile, 0.0).to(tl.float32)
    delta = tl.where(of_t[:, None], softplus(dt + bias), 0.0)  # past the row's end: nothing decays
    gain = delta * tl.load(x_place, of_tile, 0.0).to(tl.float32)
    grad_y = tl.load(place, of_tile, 0.0).to(tl.float32)
    if z_ptr is not None:
        place = z_ptr + row * z_row + at * z_token + (step * z_token)[:, None] + e[None, :]
        z = tl.load(place, of_tile, 0.0).to(tl.float32)
        grad_y *= z * sigmoid(z)
    grad_gain = tl.zeros((TOKENS, CHANNELS), tl.float32)
    grad_log2 = tl.zeros((TOKENS, CHANNELS), tl.float32)  # of delta, by way of exp2(delta A)
    is_first, is_last = (step == 0)[:, None], (step == TOKENS - 1)[:, None]
    one = tl.full((TOKENS, CHANNELS), 1.0, tl.float32)
    for n in range(0, N):
        along = (row * N + n) * length + at + step
        state = (slot * N + n) * channels + e
        sums = ((tl.program_id(1).to(tl.int64) * tl.num_programs(2) + row) * N + n) * length + at + step
        A = tl.load(A_ptr + n * channels + e, of_e, 0.0)[None, :]
        decay = tl.exp2(delta * A)
        if starts_ptr is not None:
            begins = tl.load(starts_ptr + row * length + at + step, of_t, 0) != 0
            decay = tl.where(begins[:, None], 0.0, decay)

        h_in = tl.load(before_ptr + state, of_e, 0.0)[None, :]
        if starts_ptr is not None:
            h_in = tl.where(tl.abs(h_in) < float("inf"), h_in, 0.0)
        B = tl.load(B_along_ptr + along, of_t, 0.0)[:, None]
        added = gain * B + tl.where(is_first, decay * h_in, 0.0)
        if starts_ptr is not None:
            added = tl.where(tl.abs(added) < float("inf"), added, 0.0)
        before = tl.where(is_first, h_in, 0.0)
        _, h, _, before = tl.associative_scan((decay, added, one, before), 0, affine)
        tl.store(grad_C_ptr + sums, tl.sum(h * grad_y, 1), of_t)

        grad_in = tl.load(after_ptr + state, of_e, 0.0)[None, :]
        read = tl.load(C_along_ptr + along, of_t, 0.0)[:, None] * grad_y
        added = decay * (read + tl.where(is_last, grad_in, 0.0))
        if starts_ptr is not None:
            added = tl.where(tl.abs(added) < float("inf"), added, 0.0)
        later = tl.where(is_last, grad_in, 0.0)
        _, _, _, later = tl.associative_scan((decay, added, one, later), 0, affine, reverse=True)
        grad_h = read + later
        grad_gain += B * grad_h
        tl.store(grad_B_ptr + sums, tl.sum(gain * grad_h, 1), of_t)

        grad_exponent = decay * before * grad_h
        grad_log2 += A * grad_exponent
        tl.debug_barrier()  # every thread has read what is written over now
        tl.store(after_ptr + state, tl.sum(delta * grad_exponent, 0), of_e)

    # Read again, since registers are scarcer than the cache.
    x = tl.load(x_place, of_tile, 0.0).to(tl.float32)
    dt = tl.load(dt_place, of_tile, 0.0).to(tl.float32)
    grad_dt = (grad_gain * x + 0.6931471805599453 * grad_log2) * sigmoid(dt + bias)
    place = grad_dt_ptr + row * grad_dt_row + at * grad_dt_token + (step * grad_dt_token)[:, None] + e[None, :]
    tl.store(place, grad_dt, of_tile)
    place = grad_x_ptr + row * grad_x_row + at * grad_x_token + (step * grad_x_token)[:, None] + e[None, :]
    tl.store(place, grad_gain * delta + D * grad_y, of_tile)
    tl.store(grad_D_ptr + slot * channels + e, tl.sum(grad_y * x, 0), of_e)
    tl.store(grad_bias_ptr + slot * channels + e, tl.sum(tl.where(of_t[:, None], grad_dt, 0.0), 0), of_e)
