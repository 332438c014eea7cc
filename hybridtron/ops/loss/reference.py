"""Cross-entropy of next tokens, with the z-loss that keeps the logits' normaliser near 1.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Sums, not means: whoever adds up micro-batches and ranks divides by the number of tokens at the end. Here the logits
are given, and whole; what training computes, without ever having them all, is `linear_loss`.

Legend: T any leading axes of tokens, N their product, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.dispatch import op
from hybridtron.ops.norm.reference import at_least_fp32


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
