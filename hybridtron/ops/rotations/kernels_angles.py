"""Triton kernels for a row's rotation angles, computed as sums inside token blocks and carries between blocks.

Each token has a turn: its step times its rate. The angle theta_t is the sum of the turns in t's document, up to t. A
row is divided into blocks with BLOCK tokens:

    theta_t = sum over the turns in t's block and t's document, up to t
              + carry into the block, if t's document began before the block
    carry into the next block = sum over those turns in the block that belong to the document of its last token
              + carry into the block, if no document begins in the block; modulo 2 pi

The backward pass runs from the row's end to its beginning. R_t is the sum of the angles' gradients from t to the end of
t's document. R is also computed by blocks and carries. Then, for head h and angle s,

    dstep_th = sum_s R_ths rate_ts,   drate_ts = sum_h R_ths step_th

Sums inside a block are fp32: they amount to only a few full turns, so their rounding errors are small. Carries are
added up in float64, and stored in fp32. Only the angles and their gradient are stored as tensors (B, L, H, S). No
kernel uses atomics, so results are deterministic. The kernels were checked on an H200 (benchmarks/gpu.md).

Legend: B rows (sequences in the batch), L tokens per row, H heads, S angles per head, K blocks, T tokens per block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla.kernels_forward import begins
from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2
from hybridtron.ops.rotations.reference import AngleInputs

BLOCK = 32  # tokens per block
WARPS = 4
MANY = 32  # if S is larger, `_gradients` runs with 2 * WARPS warps per program; with WARPS it would spill registers
FULL_TURN = tl.constexpr(6.283185307179586)


def angles(inputs: AngleInputs) -> Tensor:
    """Return the angles in fp32. Gradients with respect to steps and rates are supported."""
    return _TritonAngles.apply(inputs.steps_BLH.float(), inputs.rates_BLS.float(), document_starts(inputs.documents_BL))


class _TritonAngles(torch.autograd.Function):
    """Autograd function around all kernels. It saves only the inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        fields: list[Any] = [t if t is None else t.contiguous() for t in tensors]
        ctx.save_for_backward(*fields)
        steps_BLH, rates_BLS, starts_BL = fields
        rows, _, heads = steps_BLH.shape
        theta_BLHS = steps_BLH.new_empty(*steps_BLH.shape, rates_BLS.shape[2])
        carry_BKHS, sizes = _carried(fields, None)
        starts = steps_BLH if starts_BL is None else starts_BL
        grid = (carry_BKHS.shape[1], heads, rows)
        launch(_angles, grid, steps_BLH, rates_BLS, starts, carry_BKHS, theta_BLHS, *sizes, warps=WARPS)
        return theta_BLHS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHS: Tensor) -> tuple[Tensor | None, ...]:
        fields = ctx.saved_tensors
        grad_BLHS = grad_BLHS.contiguous()
        steps_BLH, rates_BLS, starts_BL = fields
        carry_BKHS, sizes = _carried(fields, grad_BLHS)
        grad_steps_BLH = torch.empty_like(steps_BLH)
        grad_rates_BLS = torch.empty_like(rates_BLS)
        starts = steps_BLH if starts_BL is None else starts_BL
        grid = (carry_BKHS.shape[1], len(steps_BLH))
        warps = WARPS if rates_BLS.shape[2] <= MANY else 2 * WARPS
        launch(
            _gradients, grid, steps_BLH, rates_BLS, starts, carry_BKHS, grad_BLHS, grad_steps_BLH, grad_rates_BLS,
            *sizes, warps=warps,
        )  # fmt: skip
        return grad_steps_BLH, grad_rates_BLS, None


class AngleSizes(NamedTuple):
    """The last arguments for all kernels."""

    length: int  # L
    heads: int  # H
    documents: bool  # True if rows have several documents
    angles: int  # S
    block: int  # T
    padded: int  # S, padded to a power of two


def _carried(fields: list[Any], grad_BLHS: Tensor | None) -> tuple[Tensor, AngleSizes]:
    """Return the carry into each block (B, K, H, S), and the last arguments for the kernels.

    In the forward pass (`grad_BLHS` is None), the carry is the angle at the token before the block. In the backward
    pass, let d be the document of the block's last token. The carry is the sum of the angles' gradients at d's tokens
    after the block.
    """
    steps_BLH, rates_BLS, starts_BL = fields
    rows, length, heads = steps_BLH.shape
    size = rates_BLS.shape[2]
    blocks = ceil_div(length, BLOCK)
    sizes = AngleSizes(length, heads, starts_BL is not None, size, BLOCK, power_of_2(size))
    starts = steps_BLH if starts_BL is None else starts_BL
    carry_BKHS = steps_BLH.new_empty(rows, blocks, heads, size)
    reverse = grad_BLHS is not None
    grad = steps_BLH if grad_BLHS is None else grad_BLHS
    grid = (blocks, heads, rows)
    launch(_sums, grid, steps_BLH, rates_BLS, starts, grad, carry_BKHS, *sizes, reverse, warps=WARPS)
    launch(_carry, (heads, rows), starts, carry_BKHS, blocks, *sizes, reverse, warps=1)
    return carry_BKHS, sizes


@triton.jit
def _sums(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, starts_BL: tl.tensor, grad_BLHS: tl.tensor, sums_BKHS: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    REVERSED: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum that one block adds to one head's carry. Grid: (blocks, heads, rows).

    The sum adds up the turns of those tokens in the block that belong to the document of the block's last token. With
    REVERSED, it adds up the gradients of those that belong to the document of the token before the block.
    """
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T = block * BLOCK + tl.arange(0, BLOCK)
    s_S = tl.arange(0, SIZE)
    if REVERSED:
        x_TS = _of_head(grad_BLHS, row, token_T, head, s_S, length, heads, S)
    else:
        x_TS = _turns(steps_BLH, rates_BLS, row, token_T, head, s_S, length, heads, S)
    if DOCUMENTS:
        begun_T = tl.cumsum(begins(starts_BL, row, token_T, length), axis=0)
        wanted_T = begun_T == 0 if REVERSED else begun_T == tl.max(begun_T, axis=0)
        x_TS = tl.where(wanted_T[:, None], x_TS, 0.0)
    place = ((row * tl.num_programs(0) + block) * heads + head) * S
    tl.store(sums_BKHS + place + s_S, tl.sum(x_TS, axis=0), mask=s_S < S)


@triton.jit
def _carry(
    starts_BL: tl.tensor, sums_BKHS: tl.tensor, blocks: int, length: int, heads: int, DOCUMENTS: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, REVERSED: tl.constexpr,
) -> None:  # fmt: skip
    """Replace each block's sum by the carry into this block, for one head. Grid: (heads, rows)."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s_S = tl.arange(0, SIZE)
    carry_S = tl.zeros([SIZE], tl.float64)
    for step in range(blocks):
        block = blocks - 1 - step if REVERSED else step
        place = sums_BKHS + ((row * blocks + block) * heads + head) * S + s_S
        sum_S = tl.load(place, mask=s_S < S, other=0.0).to(tl.float64)
        tl.store(place, carry_S.to(tl.float32), mask=s_S < S)
        if DOCUMENTS:
            token_T = block * BLOCK + tl.arange(0, BLOCK)
            carry_S = tl.where(tl.sum(begins(starts_BL, row, token_T, length), axis=0) == 0, carry_S, 0.0)
        carry_S += sum_S
        if not REVERSED:
            carry_S -= FULL_TURN * tl.floor(carry_S / FULL_TURN)


@triton.jit
def _angles(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, starts_BL: tl.tensor, carry_BKHS: tl.tensor, theta_BLHS: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Store the angles for one block's tokens and one head. Grid: (blocks, heads, rows)."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T = block * BLOCK + tl.arange(0, BLOCK)
    s_S = tl.arange(0, SIZE)
    turns_TS = _turns(steps_BLH, rates_BLS, row, token_T, head, s_S, length, heads, S)
    place = ((row * tl.num_programs(0) + block) * heads + head) * S
    carry_TS = tl.load(carry_BKHS + place + s_S, mask=s_S < S, other=0.0)[None, :]
    if DOCUMENTS:
        begins_T = begins(starts_BL, row, token_T, length)
        carry_TS = tl.where((tl.cumsum(begins_T, axis=0) == 0)[:, None], carry_TS, 0.0)
        within_TS, _ = tl.associative_scan((turns_TS, _across(begins_T, BLOCK, SIZE)), 0, joined)
    else:
        within_TS = tl.cumsum(turns_TS, axis=0)
    at_TS = ((row * length + token_T) * heads + head)[:, None] * S + s_S[None, :]
    there_TS = tl.expand_dims(token_T < length, 1) & tl.expand_dims(s_S < S, 0)
    tl.store(theta_BLHS + at_TS, within_TS + carry_TS, mask=there_TS)


@triton.jit
def _gradients(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, starts_BL: tl.tensor, carry_BKHS: tl.tensor, grad_BLHS: tl.tensor,
    grad_steps_BLH: tl.tensor, grad_rates_BLS: tl.tensor, length: int, heads: int, DOCUMENTS: tl.constexpr,
    S: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Store the gradients for steps and rates in one block, in a loop over heads. Grid: (blocks, rows)."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token_T = block * BLOCK + tl.arange(0, BLOCK)
    s_S = tl.arange(0, SIZE)
    inside_T = token_T < length
    at_TS = (row * length + token_T)[:, None] * S + s_S[None, :]
    there_TS = tl.expand_dims(inside_T, 1) & tl.expand_dims(s_S < S, 0)
    rates_TS = tl.load(rates_BLS + at_TS, mask=there_TS, other=0.0)
    of_rates_TS = tl.zeros([BLOCK, SIZE], tl.float32)
    ends_T = token_T
    last_T1 = inside_T[:, None]
    if DOCUMENTS:
        begins_T = begins(starts_BL, row, token_T, length)
        ends_T = begins(starts_BL, row, token_T + 1, length)
        last_T1 = (tl.cumsum(begins_T, axis=0) == tl.sum(begins_T, axis=0))[:, None]
    for head in range(heads):
        grad_TS = _of_head(grad_BLHS, row, token_T, head, s_S, length, heads, S)
        place = ((row * tl.num_programs(0) + block) * heads + head) * S
        carry_TS = tl.load(carry_BKHS + place + s_S, mask=s_S < S, other=0.0)[None, :]
        if DOCUMENTS:
            carry_TS = tl.where(last_T1, carry_TS, 0.0)
            grad_TS, _ = tl.associative_scan((grad_TS, _across(ends_T, BLOCK, SIZE)), 0, joined, reverse=True)
        else:
            grad_TS = tl.cumsum(grad_TS, axis=0, reverse=True)
        grad_TS += carry_TS
        at_T = (row * length + token_T) * heads + head
        tl.store(grad_steps_BLH + at_T, tl.sum(grad_TS * rates_TS, axis=1), mask=inside_T)
        of_rates_TS += grad_TS * tl.load(steps_BLH + at_T, mask=inside_T, other=0.0)[:, None]
    tl.store(grad_rates_BLS + at_TS, of_rates_TS, mask=there_TS)


@triton.jit
def joined(sum_a: tl.tensor, starts_a: tl.tensor, sum_b: tl.tensor, starts_b: tl.tensor) -> tuple:
    """Combine the adjacent token ranges a and b, for associative_scan. The scan reaches a before b.

    `sum_a` and `sum_b` are the sums since the last document boundary in the range. `starts_a` and `starts_b` are 1 if
    the range has such a boundary, else 0.
    """
    return tl.where(starts_b != 0, sum_b, sum_a + sum_b), starts_a | starts_b


@triton.jit
def _across(flag_T: tl.tensor, BLOCK: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Repeat a flag per token (T,) along the angles (T, S)."""
    return tl.broadcast_to(flag_T[:, None], [BLOCK, SIZE])


@triton.jit
def _turns(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, s_S: tl.tensor,
    length: int, heads: int, S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the turns (T, S), steps times rates, for one head and a token block; entries out of range are 0."""
    at_T = row * length + token_T
    inside_T = token_T < length
    steps_T = tl.load(steps_BLH + at_T * heads + head, mask=inside_T, other=0.0)
    there_TS = tl.expand_dims(inside_T, 1) & tl.expand_dims(s_S < S, 0)
    return steps_T[:, None] * tl.load(rates_BLS + at_T[:, None] * S + s_S[None, :], mask=there_TS, other=0.0)


@triton.jit
def _of_head(
    x_BLHS: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, s_S: tl.tensor, length: int, heads: int,
    S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load x (T, S) for one head and a token block; entries out of range are 0."""
    there_TS = tl.expand_dims(token_T < length, 1) & tl.expand_dims(s_S < S, 0)
    at_TS = ((row * length + token_T) * heads + head)[:, None] * S + s_S[None, :]
    return tl.load(x_BLHS + at_TS, mask=there_TS, other=0.0)
