"""Triton kernels for the softmax of the language-model loss.

    sums:       greatest = max_v l_v,   sum = sum_v exp(l_v - greatest),   picked = l_label
    gradients:  l_v <- exp(l_v - lse) (1 + 2 z_loss lse) - [v = label],   0 for tokens outside the loss mask

l are a token's logits, and <- means that the logits are overwritten. [v = label] is 1 if v is the label, else 0.
Between the two kernels the caller computes lse = greatest + log sum; if ranks hold shards of the vocabulary, the caller
first combines all ranks' sums. A label outside 0..V - 1 is in another rank's shard; `picked` is then 0. `z_loss` is the
factor for the z-loss. Each kernel reads a logit once, and computes in fp32. No kernel uses atomics, so results are
deterministic. The kernels were checked on an H200 (benchmarks/gpu.md).

Legend: C tokens, V entries in the vocabulary or in this rank's shard.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div, launch
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSums, SoftmaxSumsInputs

BLOCK = 4096  # logits per program: 16 per thread
WARPS = 8


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    """Return each token's largest logit, summed exp(logit - largest) and label logit; one program per token."""
    logits_CV, labels_C = inputs
    tokens, size = logits_CV.shape
    sums = SoftmaxSums(*(torch.empty(tokens, dtype=torch.float32, device=logits_CV.device) for _ in range(3)))
    launch(sums_of_rows, (tokens,), logits_CV, labels_C, *sums, logits_CV.stride(0), size, BLOCK, warps=WARPS)
    return sums


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    """Overwrite the logits with their gradients and return them; one program per token and BLOCK logits."""
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
    """Store one token's largest logit, summed exponentials and label logit. Grid: tokens.

    The loop is an online softmax: the sum is rescaled whenever a block has a larger logit. `stride` is the stride of
    the token axis, and `size` is V.
    """
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
    """Overwrite BLOCK logits of one token with their gradients. Grid: (tokens, logit blocks)."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = logits_CV + token * stride + places
    lse, label, counts = tl.load(lse_C + token), tl.load(labels_C + token), tl.load(mask_C + token)
    softmax = tl.exp(tl.load(block, mask=places < size, other=0.0).to(tl.float32) - lse)
    gradient = softmax * (1 + 2 * z_loss * lse) - tl.where(places == label, 1.0, 0.0)
    # tl.where and not a product with 0, since the logits of a masked token may be NaN or infinite
    tl.store(block, tl.where(counts, gradient, 0.0), mask=places < size)
