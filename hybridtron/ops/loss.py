"""Cross-entropy of next tokens, with the z-loss that keeps the logits' normaliser near 1.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Sums, not means: whoever adds up micro-batches and ranks divides by the number of tokens at the end. The vocabulary is
whole here; splitting it over tensor-parallel ranks is not this file's business.

Legend: T any leading axes of tokens, N their product, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import op
from hybridtron.ops.norm_rope import at_least_fp32

CHUNK_VALUES = 2**22
"""Logits widened to fp32 at a time (16 MiB), so that the workspace does not grow with tokens times vocabulary."""


class Loss(NamedTuple):
    """Sums over the unmasked tokens; only `total` carries a gradient."""

    total: Tensor
    cross_entropy: Tensor
    tokens: Tensor
    per_token: Tensor


@op
def cross_entropy(logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    """Cross-entropy where the boolean mask is True, in fp32 at least; masked labels and logits may be anything."""
    # Masked rows are replaced before any arithmetic: 0 * nan would still be nan.
    wide_TV = torch.where(mask_T[..., None], at_least_fp32(logits_TV), 0.0)
    lse_T = wide_TV.logsumexp(-1)
    picked_T = wide_TV.gather(-1, torch.where(mask_T, labels_T, 0)[..., None]).squeeze(-1)
    per_token_T = torch.where(mask_T, lse_T - picked_T, 0.0)
    z_T = torch.where(mask_T, z_loss * lse_T.square(), 0.0)
    total = (per_token_T + z_T).sum()
    return Loss(total, per_token_T.detach().sum(), mask_T.sum().float(), per_token_T.detach())


class _RecomputedSoftmax(torch.autograd.Function):
    """Cross-entropy that keeps the logits and one lse a token, never the softmax or an fp32 copy of the logits."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, mask_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_VALUES // logits_NV.shape[1])
        lse_N = torch.cat([at_least_fp32(part).logsumexp(-1) for part in logits_NV.split(rows)])
        picked_N = logits_NV.gather(1, labels_N[:, None]).squeeze(1)
        per_token_N = torch.where(mask_N, lse_N - picked_N, 0.0)
        total = (per_token_N + torch.where(mask_N, z_loss * lse_N.square(), 0.0)).sum()
        ctx.save_for_backward(logits_NV, labels_N, mask_N, lse_N)
        ctx.rows, ctx.z_loss = rows, z_loss
        ctx.mark_non_differentiable(per_token_N)
        return total, per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """d total / d logits = softmax * (1 + 2 z_loss lse) - one_hot(label), zero in masked rows."""
        logits_NV, labels_N, mask_N, lse_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        chunks = (x.split(ctx.rows) for x in (grad_NV, logits_NV, labels_N, mask_N, lse_N))
        for out, logits, labels, mask, lse in zip(*chunks, strict=True):
            wide = at_least_fp32(logits).sub(lse[:, None]).exp_()
            wide.mul_((1 + 2 * ctx.z_loss * lse)[:, None])
            wide.scatter_add_(1, labels[:, None], wide.new_full((len(labels), 1), -1.0))
            out.copy_(wide.mul_(grads[0]).masked_fill_(~mask[:, None], 0.0))
        return grad_NV, None, None, None


@cross_entropy.form("recomputed")
def _(logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    labels_N = torch.where(mask_T, labels_T, 0).flatten()
    total, per_token_N = _RecomputedSoftmax.apply(logits_TV.flatten(0, -2), labels_N, mask_T.flatten(), z_loss)
    return Loss(total, per_token_N.sum(), mask_T.sum().float(), per_token_N.view(mask_T.shape))
