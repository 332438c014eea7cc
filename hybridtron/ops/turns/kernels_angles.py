"""The angles of a row by Triton: sums inside blocks of tokens, what passes from block to block, and both together.

    theta_t = sum of turns of t's document in its block up to t + carry of its block, where the document began before it
    carry   = carry of the block before, where no document begins in it, + its last document's turns, modulo 2 pi

Backward the same from the end: with R_t the sum of the gradients of t's document from t on, over blocks as above,

    dstep_th = sum_s R_ths rate_ts,   drate_ts = sum_h R_ths step_th

Sums in a block are in fp32 and few turns long; what passes between blocks is summed in float64. Nothing of the size of
the angles is kept or written besides them. No atomics. Right on an H200 (benchmarks/gpu.md).

Legend: as in `reference`; K blocks of T tokens, S angles padded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla.kernels_forward import begins
from hybridtron.ops.kernel_launch import ceil_div, launch, power_of_2
from hybridtron.ops.turns.reference import AngleInputs

BLOCK = 32  # tokens
WARPS = 4
MANY = 32  # angles, beyond which a program that goes over all heads has twice as many warps, or it spills registers
FULL_TURN = tl.constexpr(6.283185307179586)


def angles(inputs: AngleInputs) -> Tensor:
    """In fp32, with a backward pass."""
    return _TritonAngles.apply(inputs.steps_BLH.float(), inputs.rates_BLS.float(), document_starts(inputs.documents_BL))


class _TritonAngles(torch.autograd.Function):
    """Keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        fields: list[Any] = [t if t is None else t.contiguous() for t in given]
        ctx.save_for_backward(*fields)
        steps_BLH, rates_BLS, starts_BL = fields
        rows, _, heads = steps_BLH.shape
        theta_BLHS = steps_BLH.new_empty(*steps_BLH.shape, rates_BLS.shape[2])
        carry_BKHS, sizes = _carried(fields, None)
        starts = steps_BLH if starts_BL is None else starts_BL
        grid = carry_BKHS.shape[1], heads, rows
        launch(_angles, grid, steps_BLH, rates_BLS, starts, carry_BKHS, theta_BLHS, *sizes, warps=WARPS)
        return theta_BLHS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHS: Tensor) -> tuple[Tensor | None, ...]:
        fields, grad_BLHS = ctx.saved_tensors, grad_BLHS.contiguous()
        steps_BLH, rates_BLS, starts_BL = fields
        carry_BKHS, sizes = _carried(fields, grad_BLHS)
        grads = torch.empty_like(steps_BLH), torch.empty_like(rates_BLS)
        starts = steps_BLH if starts_BL is None else starts_BL
        grid = carry_BKHS.shape[1], len(steps_BLH)
        warps = WARPS if rates_BLS.shape[2] <= MANY else 2 * WARPS
        launch(_gradients, grid, steps_BLH, rates_BLS, starts, carry_BKHS, grad_BLHS, *grads, *sizes, warps=warps)
        return *grads, None


def _carried(fields: list[Any], grad_BLHS: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """What comes into every block (B, K, H, S), from the blocks before or with gradients after; sizes and constants."""
    steps_BLH, rates_BLS, starts_BL = fields
    rows, length, heads = steps_BLH.shape
    size, blocks = rates_BLS.shape[2], ceil_div(length, BLOCK)
    sizes = length, heads, starts_BL is not None, size, BLOCK, power_of_2(size)
    starts = steps_BLH if starts_BL is None else starts_BL
    carry_BKHS = steps_BLH.new_empty(rows, blocks, heads, size)
    reverse, grad = grad_BLHS is not None, steps_BLH if grad_BLHS is None else grad_BLHS
    grid = blocks, heads, rows
    launch(_sums, grid, steps_BLH, rates_BLS, starts, grad, carry_BKHS, *sizes, reverse, warps=WARPS)
    launch(_carry, (heads, rows), starts, carry_BKHS, blocks, *sizes, reverse, warps=1)
    return carry_BKHS, sizes


@triton.jit
def _sums(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, starts_BL: tl.tensor, grad_BLHS: tl.tensor, sums_BKHS: tl.tensor,
    length: int, heads: int, DOCUMENTS: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    REVERSED: tl.constexpr,
) -> None:  # fmt: skip
    """The turns of a block's last document; reversed the gradients of the tokens before the first that begins one."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T, s_S = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
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
    """In the place of every block's sum, what comes into it."""
    head, row, s_S = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, SIZE)
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
    """Of the tokens of a block, one head."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token_T, s_S = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
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
    """Of the tokens of a block, all heads."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token_T, s_S = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
    inside_T = token_T < length
    at_TS = (row * length + token_T)[:, None] * S + s_S[None, :]
    there_TS = tl.expand_dims(inside_T, 1) & tl.expand_dims(s_S < S, 0)
    rates_TS = tl.load(rates_BLS + at_TS, mask=there_TS, other=0.0)
    of_rates_TS, ends_T, last_T1 = tl.zeros([BLOCK, SIZE], tl.float32), token_T, inside_T[:, None]
    if DOCUMENTS:
        begins_T, ends_T = (begins(starts_BL, row, token_T, length), begins(starts_BL, row, token_T + 1, length))
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
    """Two stretches of a row as one: the sum of its last document's entries, and whether one starts in it."""
    return tl.where(starts_b != 0, sum_b, sum_a + sum_b), starts_a | starts_b


@triton.jit
def _across(flag_T: tl.tensor, BLOCK: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    return tl.broadcast_to(flag_T[:, None], [BLOCK, SIZE])


@triton.jit
def _turns(
    steps_BLH: tl.tensor, rates_BLS: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, s_S: tl.tensor,
    length: int, heads: int, S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Steps by rates of one head's tokens, zeros beyond."""
    at_T, inside_T = row * length + token_T, token_T < length
    steps_T = tl.load(steps_BLH + at_T * heads + head, mask=inside_T, other=0.0)
    there_TS = tl.expand_dims(inside_T, 1) & tl.expand_dims(s_S < S, 0)
    return steps_T[:, None] * tl.load(rates_BLS + at_T[:, None] * S + s_S[None, :], mask=there_TS, other=0.0)


@triton.jit
def _of_head(
    x_BLHS: tl.tensor, row: tl.tensor, token_T: tl.tensor, head: tl.tensor, s_S: tl.tensor, length: int, heads: int,
    S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    there_TS = tl.expand_dims(token_T < length, 1) & tl.expand_dims(s_S < S, 0)
    at_TS = ((row * length + token_T) * heads + head)[:, None] * S + s_S[None, :]
    return tl.load(x_BLHS + at_TS, mask=there_TS, other=0.0)
