"""Cross entropy of logits whose vocabulary is cut over tensor-parallel ranks; on one rank, the op itself.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Each rank reduces its own share of the vocabulary; the ranks then exchange one maximum, one sum and one picked logit
per token, and never a logit more.

Legend: N tokens, V this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops import loss as ops
from hybridtron.ops.loss import Loss
from hybridtron.ops.norm_rope import at_least_fp32
from hybridtron.parallel.linear import TensorGroup


def cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor, z_loss: float, tensor: TensorGroup) -> Loss:
    """As `ops.loss.cross_entropy`, for a share of the logits; the same numbers on every rank."""
    if tensor.size == 1:
        return ops.cross_entropy(logits, labels, mask, z_loss)
    flat = logits.flatten(0, -2), labels.flatten(), mask.flatten()
    total, per_token_N = _VocabularyParallel.apply(*flat, z_loss, tensor)
    return Loss(total, per_token_N.sum(), mask.sum().float(), per_token_N.view(labels.shape))


class _VocabularyParallel(torch.autograd.Function):
    """Keeps the logits and one lse a token."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, mask_N: Tensor, z_loss: float, tensor: TensorGroup
    ) -> tuple[Tensor, Tensor]:
        wide_NV = at_least_fp32(logits_NV)
        maximum_N = wide_NV.amax(-1)
        dist.all_reduce(maximum_N, op=dist.ReduceOp.MAX, group=tensor.group)
        sums_N = (wide_NV - maximum_N[:, None]).exp().sum(-1)
        size = logits_NV.shape[1]
        local_N = labels_N - tensor.rank * size
        mine_N = (local_N >= 0) & (local_N < size)
        picked_N = wide_NV.gather(1, torch.where(mine_N, local_N, 0)[:, None]).squeeze(1)
        exchanged = torch.stack([sums_N, torch.where(mine_N, picked_N, 0.0)])
        dist.all_reduce(exchanged, group=tensor.group)
        lse_N = exchanged[0].log() + maximum_N
        per_token_N = torch.where(mask_N, lse_N - exchanged[1], 0.0)
        total = (per_token_N + torch.where(mask_N, z_loss * lse_N.square(), 0.0)).sum()
        ctx.save_for_backward(logits_NV, lse_N, torch.where(mine_N, local_N, -1), mask_N)
        ctx.z_loss = z_loss
        ctx.mark_non_differentiable(per_token_N)
        return total, per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        logits_NV, lse_N, local_N, mask_N = ctx.saved_tensors
        softmax_NV = (at_least_fp32(logits_NV) - lse_N[:, None]).exp()
        grad_NV = softmax_NV * (1 + 2 * ctx.z_loss * lse_N)[:, None]
        mine_N = local_N >= 0
        rows_N = torch.arange(len(local_N), device=local_N.device)
        grad_NV[rows_N, local_N.clamp(min=0)] -= mine_N.to(grad_NV.dtype)
        grad_NV = torch.where(mask_N[:, None], grad_NV * grad_total, 0.0)
        return grad_NV.to(logits_NV.dtype), None, None, None, None
