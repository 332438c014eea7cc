"""Triton kernels for Mamba-1's selective scan: the forward pass.

    delta_t = softplus(dt_t + dt_bias)
    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t
    y_t = (C_t h_t + D x_t) silu(z_t)

h is the state. A row (a sequence in the batch) is divided into chunks, so that even a single long row occupies a GPU.
Three kernels run one after another:

    walk      scans each chunk from a zero state; stores the chunk's last state and its sum of delta
    chain     computes the true state before each chunk (in the equation, the sum is over chunk k's tokens):
              state before chunk k+1 = (state stored by `walk` for chunk k) + exp(A sum delta) (state before chunk k)
    retrace   scans each chunk again, from its true state; stores y

Exponentials limit the speed. Each token and channel needs N exponentials, and a multiprocessor computes only 16 in a
cycle. Memory traffic does not limit the speed: in bf16, x, dt, z and y are 8 bytes for each token and channel. Because
`walk` and `retrace` both scan every token, each exponential is computed twice. A single scan over the full row would
avoid this, but has too little parallelism. With one warp for 128 channels, an H200 needs about 135,000 channels over
all rows to be busy, while a micro-batch with 8 rows for Samba 1.3B has only 37,000 channels. So `forward` always uses
chunks.

With N = 16, a thread holds all N state entries for 4 channels in registers, so sums over N need no other thread.
float64 is not supported. The backward pass is in `kernels_backward`. The kernels were checked on an H200
(benchmarks/gpu.md).

Legend: B rows, L tokens, E inner channels, N state entries per channel (padded to a power of 2 in the kernels), K
chunks with CHUNK tokens, Q tiles (shorter token ranges that the backward pass uses), P parts (chunks or tiles). States
are stored as (N, E), so channels are contiguous in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.documents import document_starts
from hybridtron.ops.kernel_launch import ceil_div, empty_in_order, last_side_by_side, launch, power_of_2
from hybridtron.ops.scan.reference import ScanInputs

CHUNK = 128  # tokens per program
WARP_STATES = 2048  # state entries in one warp's registers: 64 per thread
WARP_CHANNELS = 128  # maximum channels per warp
CHAIN_PARTS = 16  # parts whose states `chain` loads together
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class ScanRow:
    """The op's inputs for all rows in the kernels' layout: contiguous last axes, and parameters in fp32.

    `log2_decay_NE` is A times log2(e), because the kernels compute exp(delta A) as exp2(delta A log2(e)).
    """

    x_BLE: Tensor
    dt_BLE: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    z_BLE: Tensor | None
    log2_decay_NE: Tensor
    D_E: Tensor
    dt_bias_E: Tensor
    starts_BL: Tensor | None  # int8: 1 where a document begins

    @staticmethod
    def of(inputs: ScanInputs) -> ScanRow:
        z_BLE = inputs.z_BLE
        starts_BL = document_starts(inputs.documents_BL)
        return ScanRow(
            last_side_by_side(inputs.x_BLE),
            last_side_by_side(inputs.dt_BLE),
            last_side_by_side(inputs.B_BLN),
            last_side_by_side(inputs.C_BLN),
            None if z_BLE is None else last_side_by_side(z_BLE),
            (inputs.A_EN.mT.float() * LOG2_E).contiguous(),
            inputs.D_E.float().contiguous(),
            inputs.dt_bias_E.float().contiguous(),
            None if starts_BL is None else starts_BL.to(torch.int8).contiguous(),
        )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, L, E and N."""
        rows, length, channels = self.x_BLE.shape
        return rows, length, channels, self.B_BLN.shape[2]

    def per_part(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return two uninitialized buffers, for each part's state and each part's sum of delta.

        A part has `tokens` tokens.
        """
        rows, length, channels, states = self.sizes
        parts = ceil_div(length, tokens)
        return self.D_E.new_empty(rows, parts, states, channels), self.D_E.new_empty(rows, parts, channels)

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments that every kernel takes first."""
        per_token = (self.x_BLE, self.dt_BLE, self.B_BLN, self.C_BLN, self.z_BLE)
        parameters = (self.log2_decay_NE, self.D_E, self.dt_bias_E)
        return *per_token, *parameters, self.starts_BL, *self.sizes[1:3], *strides_of(per_token)

    def tile(self) -> tuple[int, int, int]:
        """Return N, N padded to a power of 2, and the number of channels whose states a warp holds."""
        states = self.sizes[3]
        padded = power_of_2(states)
        return states, padded, min(max(WARP_STATES // padded, 1), WARP_CHANNELS)

    def grid(self, tokens: int, channels: int) -> tuple[int, int, int]:
        """Return the grid: parts with `tokens` tokens, blocks with `channels` channels, rows.

        Parts are the first axis, because CUDA limits the other two axes to 65,535.
        """
        rows, length, width, _ = self.sizes
        return ceil_div(length, tokens), ceil_div(width, channels), rows


def strides_of(tensors_BL: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """Return each tensor's row stride and token stride; both are 0 for None."""
    strides = [(0, 0) if tensor is None else tensor.stride()[:2] for tensor in tensors_BL]
    return tuple(stride for pair in strides for stride in pair)


def forward(row: ScanRow, state_BEN: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the state after the last token (B, N, E), and the state before each chunk (B, K, N, E).

    `state_BEN` is the state before the row, or None for zeros.
    """
    state_BNE = None if state_BEN is None else state_BEN.mT.float().contiguous()
    states_BKNE, elapsed_BKE = row.per_part(CHUNK)
    tile = row.tile()
    launch(_walk, row.grid(CHUNK, tile[2]), *row.arguments(), states_BKNE, elapsed_BKE, CHUNK, *tile, warps=1)
    last_BNE = chain(row, states_BKNE, elapsed_BKE, state_BNE, backwards=False)
    y_BLE = empty_in_order(row.x_BLE)
    retrace(row, states_BKNE, y_BLE, None, None, None)
    return y_BLE, last_BNE, states_BKNE


def retrace(
    row: ScanRow,
    states_BKNE: Tensor,
    y_BLE: Tensor | None,
    grad_y_BLE: Tensor | None,
    grad_z_BLE: Tensor | None,
    tiles: tuple[Tensor, int] | None,
) -> None:
    """Scan every chunk from the state before it, and store the outputs whose tensors are not None.

    The forward pass asks for y. The backward pass asks for z's gradient and for the state before every tile. `grad_y`
    is an input, from which z's gradient is computed. `tiles` has the tensor for the states before tiles, then the
    number of tokens per tile.
    """
    tile = row.tile()
    tiles_BQNE, tokens = tiles or (None, CHUNK)
    launch(
        _retrace, row.grid(CHUNK, tile[2]), *row.arguments(), y_BLE, grad_y_BLE, grad_z_BLE,
        *strides_of((y_BLE, grad_y_BLE, grad_z_BLE)), states_BKNE, tiles_BQNE, CHUNK, tokens, *tile, warps=1,
    )  # fmt: skip


def chain(row: ScanRow, states_BPNE: Tensor, elapsed_BPE: Tensor, first_BNE: Tensor | None, backwards: bool) -> Tensor:
    """Replace each part's last state by the true state before the part; return the state after the last part.

    On entry, `states` holds each part's last state, scanned from a zero state. Parts are chunks or tiles. `elapsed` has
    each part's sum of delta, and `first` is the state before the row, or None for zeros.

    If `backwards`, the tensors hold gradients of states, and the order is from the last part to the first. On entry,
    `states` holds each part's own contribution to the gradient of the state before the part, and `first` is the
    gradient of the state after the row. The contribution is replaced by the gradient of the state after the part. The
    result is the gradient of the state before the row.
    """
    rows, parts, states, channels = states_BPNE.shape
    last_BNE = states_BPNE.new_empty(rows, states, channels)
    launch(
        _chain, (ceil_div(channels, WARP_CHANNELS), states, rows), states_BPNE, elapsed_BPE, row.log2_decay_NE,
        first_BNE, last_BNE, parts, channels, backwards, CHAIN_PARTS, WARP_CHANNELS, warps=1,
    )  # fmt: skip
    return last_BNE


@triton.jit
def softplus(v: tl.tensor) -> tl.tensor:
    """Return log(1 + exp(v)) = max(v, 0) + log(1 + s) with s = exp(-|v|).

    log(1 + s) / s is approximated by its minimax polynomial of degree 8 on [0, 1], with a relative error of 3e-8.
    """
    s = tl.exp(-tl.abs(v))
    p = (0.005232693627476692 * s - 0.02950523979961872) * s + 0.07822596281766891
    p = ((p * s - 0.13663247227668762) * s + 0.19106008112430573) * s - 0.2484298199415207
    p = ((p * s + 0.3331909775733948) * s - 0.4999949336051941) * s + 0.9999999403953552
    return tl.maximum(v, 0) + p * s


@triton.jit
def sigmoid(v: tl.tensor) -> tl.tensor:
    return 1 / (1 + tl.exp(-v))


@triton.jit
def barred(
    decay: tl.tensor, added: tl.tensor, decay_before: tl.tensor, before: tl.tensor, next_decay: tl.tensor,
    next_added: tl.tensor, next_decay_before: tl.tensor, next_before: tl.tensor,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """Combine two adjacent ranges of steps in the recurrence h -> decay h + added; `_chain` scans with this operator.

    Let h be the state before a range. Four numbers describe the range:

        decay, added           the state after the range is decay h + added
        decay_before, before   the state before the range's last step is decay_before h + before

    A single step is (decay, added, 1, 0). `_chain` folds the row's initial state h into its first step, which becomes
    (decay, decay h + added, 1, h). So after the scan, `added` is the state after each step, and `before` is the state
    before each step. The arguments are the earlier range, then the later range (`next_`). A decay of 0 drops even an
    infinite state.
    """
    return (
        decay * next_decay,
        tl.where(next_decay == 0, 0.0, next_decay * added) + next_added,
        decay * next_decay_before,
        tl.where(next_decay_before == 0, 0.0, next_decay_before * added) + next_before,
    )


@triton.jit
def _walk(
    x_ptr: tl.tensor, dt_ptr: tl.tensor, B_ptr: tl.tensor, C_ptr: tl.tensor, z_ptr: tl.tensor, A_ptr: tl.tensor,
    D_ptr: tl.tensor, bias_ptr: tl.tensor, starts_ptr: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    dt_row: int, dt_token: int, B_row: int, B_token: int, C_row: int, C_token: int, z_row: int, z_token: int,
    states_ptr: tl.tensor, elapsed_ptr: tl.tensor, CHUNK: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Store a chunk's last state, scanned from a zero state, and its sum of delta.

    If a document begins in the chunk, the stored sum is minus infinity. `_chain` then passes no state from before the
    chunk on to the next chunk. Grid: (chunks, blocks with CHANNELS channels, rows). A program is one warp, which holds
    a state (N_PADDED, CHANNELS).
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
    h = tl.zeros((N_PADDED, CHANNELS), tl.float32)
    elapsed = tl.zeros((CHANNELS,), tl.float32)
    at = chunk.to(tl.int64) * CHUNK
    for _ in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, length)):
        x = tl.load(x_ptr + row * x_row + at * x_token + e, of_e, 0.0).to(tl.float32)
        dt = tl.load(dt_ptr + row * dt_row + at * dt_token + e, of_e, 0.0).to(tl.float32)
        B = tl.load(B_ptr + row * B_row + at * B_token + n, of_n, 0.0).to(tl.float32)
        delta = softplus(dt + bias)
        decay = tl.exp2(delta[None, :] * A)
        elapsed += delta
        if starts_ptr is not None:
            begins = tl.load(starts_ptr + row * length + at) != 0
            h = tl.where(begins, 0.0, h)
            elapsed = tl.where(begins, float("-inf"), elapsed)
        h = decay * h + (delta * x)[None, :] * B[:, None]
        at += 1
    slot = row * tl.num_programs(0) + chunk
    tl.store(states_ptr + slot * N * channels + tile, h, of_tile)
    tl.store(elapsed_ptr + slot * channels + e, elapsed, of_e)


@triton.jit
def _retrace(
    x_ptr: tl.tensor, dt_ptr: tl.tensor, B_ptr: tl.tensor, C_ptr: tl.tensor, z_ptr: tl.tensor, A_ptr: tl.tensor,
    D_ptr: tl.tensor, bias_ptr: tl.tensor, starts_ptr: tl.tensor, length: int, channels: int, x_row: int, x_token: int,
    dt_row: int, dt_token: int, B_row: int, B_token: int, C_row: int, C_token: int, z_row: int, z_token: int,
    y_ptr: tl.tensor, grad_y_ptr: tl.tensor, grad_z_ptr: tl.tensor, y_row: int, y_token: int, grad_y_row: int,
    grad_y_token: int, grad_z_row: int, grad_z_token: int, states_ptr: tl.tensor, tiles_ptr: tl.tensor,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, N_PADDED: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Scan a chunk from the state before it, and store the outputs whose pointers are not None (`retrace`).

    Grid: (chunks, blocks with CHANNELS channels, rows). All outputs need the state, which is in registers, so one loop
    computes them all; the compiler removes the code for outputs that are None.
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
    D = tl.load(D_ptr + e, of_e, 0.0)
    h = tl.load(states_ptr + (row * tl.num_programs(0) + chunk) * N * channels + tile, of_tile, 0.0)
    at = chunk.to(tl.int64) * CHUNK
    parts = tl.cdiv(length, TOKENS)
    for part in range(chunk * (CHUNK // TOKENS), tl.minimum((chunk + 1) * (CHUNK // TOKENS), parts)):
        if tiles_ptr is not None:
            tl.store(tiles_ptr + (row * parts + part) * N * channels + tile, h, of_tile)
        for _ in range(part * TOKENS, tl.minimum((part + 1) * TOKENS, length)):
            x = tl.load(x_ptr + row * x_row + at * x_token + e, of_e, 0.0).to(tl.float32)
            dt = tl.load(dt_ptr + row * dt_row + at * dt_token + e, of_e, 0.0).to(tl.float32)
            B = tl.load(B_ptr + row * B_row + at * B_token + n, of_n, 0.0).to(tl.float32)
            delta = softplus(dt + bias)
            decay = tl.exp2(delta[None, :] * A)
            if starts_ptr is not None:
                h = tl.where(tl.load(starts_ptr + row * length + at) != 0, 0.0, h)
            h = decay * h + (delta * x)[None, :] * B[:, None]
            if y_ptr is not None or grad_z_ptr is not None:
                C = tl.load(C_ptr + row * C_row + at * C_token + n, of_n, 0.0).to(tl.float32)
                y = tl.sum(h * C[:, None], 0) + D * x
                if z_ptr is not None:
                    z = tl.load(z_ptr + row * z_row + at * z_token + e, of_e, 0.0).to(tl.float32)
                    gate = sigmoid(z)
                if grad_z_ptr is not None:
                    grad_y = tl.load(grad_y_ptr + row * grad_y_row + at * grad_y_token + e, of_e, 0.0).to(tl.float32)
                    grad_z = grad_y * y * gate * (1 + z * (1 - gate))
                    tl.store(grad_z_ptr + row * grad_z_row + at * grad_z_token + e, grad_z, of_e)
                if y_ptr is not None:
                    if z_ptr is not None:
                        y *= z * gate
                    tl.store(y_ptr + row * y_row + at * y_token + e, y, of_e)
            at += 1


@triton.jit
def _chain(
    states_ptr: tl.tensor, elapsed_ptr: tl.tensor, A_ptr: tl.tensor, first_ptr: tl.tensor, last_ptr: tl.tensor,
    parts: int, channels: int, BACKWARDS: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Replace each part's last state by the true state before the part, for CHANNELS channels and one n (`chain`).

    n is an index of the axis N. Grid: (channel blocks, n, rows). STEPS parts are loaded together, and combined by an
    associative scan.
    """
    n, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    states = tl.num_programs(1)
    e = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    step = tl.arange(0, STEPS)
    of_e = e < channels
    is_first = (step == 0)[:, None]
    is_last = (step == STEPS - 1)[:, None]
    A = tl.load(A_ptr + n * channels + e, of_e, 0.0)
    no_decay = tl.full((STEPS, CHANNELS), 1.0, tl.float32)
    h = tl.zeros((CHANNELS,), tl.float32)
    if first_ptr is not None:
        h = tl.load(first_ptr + (row * states + n) * channels + e, of_e, 0.0)
    for done in range(0, parts, STEPS):
        part = done + step
        of_tile = (part < parts)[:, None] & of_e[None, :]
        slot = (row * parts + (parts - 1 - part if BACKWARDS else part))[:, None]
        place = states_ptr + (slot * states + n) * channels + e[None, :]
        added = tl.load(place, of_tile, 0.0)
        elapsed = tl.load(elapsed_ptr + slot * channels + e[None, :], of_tile, 0.0)
        decay = tl.where(elapsed < 0, 0.0, tl.exp2(A[None, :] * tl.maximum(elapsed, 0.0)))
        entering = tl.where(is_first, tl.expand_dims(h, 0), 0.0)
        added += tl.where(decay == 0, 0.0, decay * entering)
        _, after, _, entering = tl.associative_scan((decay, added, no_decay, entering), 0, barred)
        tl.store(place, entering, of_tile)
        h = tl.sum(tl.where(is_last, after, 0.0), 0)
    tl.store(last_ptr + (row * states + n) * channels + e, h, of_e)
