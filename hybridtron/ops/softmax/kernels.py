"""The softmax of a loss by Triton: one kernel reads the logits for its sums, one writes gradients over them.

Each reads a logit once, and all arithmetic is fp32. Rows are independent and a row is summed in one order: the same
call gives the same bits again. The equations are in `reference`.

Right on an H200 (benchmarks/gpu.md).

Legend: C tokens, V vocabulary, or a part of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div, launch
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSums, SoftmaxSumsInputs

BLOCK = 4096  # logits that a program holds: 16 to a thread
WARPS = 8


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    """One program for each token."""
    logits_CV, labels_C = inputs
    tokens, size = logits_CV.shape
    sums = SoftmaxSums(*(torch.empty(tokens, dtype=torch.float32, device=logits_CV.device) for _ in range(3)))
    launch(sums_of_rows, (tokens,), logits_CV, labels_C, *sums, logits_CV.stride(0), size, BLOCK, warps=WARPS)
    return sums


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    """One program for each token and BLOCK logits."""
    logits_CV, *per_token, z_loss = inputs
    tokens, size = logits_CV.shape
    grid = tokens, ceil_div(size, BLOCK)
    launch(gradients_of_blocks, grid, logits_CV, *per_token, logits_CV.stride(0), size, z_loss, BLOCK, warps=WARPS)
    return logits_CV


@triton.jit
def sums_of_rows(
    logits_CV: tl.tensor,
    labels_C: tl.tensor,
    greatest_C: tl.tensor,
    sum_C: tl.tensor,
    picked_C: tl.tensor,
    stride: int,
    size: int,
    BLOCK: tl.constexpr,
) -> None:
    """Of one token: a sum that is scaled again whenever a larger logit comes."""
    token = tl.program_id(0).to(tl.int64)
    row_V = logits_CV + token * stride
    places = tl.arange(0, BLOCK)
    greatest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, size, BLOCK):
        is_logit = start + places < size
        logits = tl.load(row_V + start + places, mask=is_logit, other=-float("inf")).to(tl.float32)
        before = greatest
        greatest = tl.maximum(before, tl.max(logits, 0))
        total = total * tl.exp(before - greatest) + tl.sum(tl.exp(logits - greatest), 0)
    label = tl.load(labels_C + token)
    is_here = (label >= 0) & (label < size)
    picked = tl.load(row_V + tl.where(is_here, label, 0)).to(tl.float32)
    tl.store(greatest_C + token, greatest)
    tl.store(sum_C + token, total)
    tl.store(picked_C + token, tl.where(is_here, picked, 0.0))


@triton.jit
def gradients_of_blocks(
    logits_CV: tl.tensor,
    labels_C: tl.tensor,
    mask_C: tl.tensor,
    lse_C: tl.tensor,
    stride: int,
    size: int,
    z_loss: float,
    BLOCK: tl.constexpr,
) -> None:
    """Of one token and BLOCK logits."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = logits_CV + token * stride + places
    lse, label, counts = tl.load(lse_C + token), tl.load(labels_C + token), tl.load(mask_C + token)
    softmax = tl.exp(tl.load(block, mask=places < size, other=0.0).to(tl.float32) - lse)
    gradient = softmax * (1 + 2 * z_loss * lse) - tl.where(places == label, 1.0, 0.0)
    # chosen and not multiplied by 0: a masked row may hold what is no number
    tl.store(block, tl.where(counts, gradient, 0.0), mask=places < size)
