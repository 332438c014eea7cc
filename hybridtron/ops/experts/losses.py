"""Losses of a router: on large logits, and on uneven loads.

    z_loss = mean over t of logsumexp_e(z_te)^2
    balance_loss = E sum over e of f_e p_e,   p_e = mean over t of s_te

f_e is the fraction of choices that went to expert e, a value without gradient. The caller decides which tokens it
counts: those of the same sequence, or those of the last step. Both losses are 0 for zero tokens.

Legend: T tokens, E experts. Any axes may precede them; each entry of these axes has a loss of its own.
"""

from __future__ import annotations

from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean square of the logits' log-sum-exp, in at least fp32."""
    squares_T = at_least_fp32(logits_TE).logsumexp(-1).square()
    return squares_T.sum(-1) / max(1, logits_TE.shape[-2])


def balance_loss(scores_TE: Tensor, fractions_E: Tensor) -> Tensor:
    """Return the balance loss: 1 if scores are even and sum to 1, as softmax's do, whatever the fractions."""
    means_E = scores_TE.sum(-2) / max(1, scores_TE.shape[-2])
    return scores_TE.shape[-1] * (fractions_E.detach().to(means_E.dtype) * means_E).sum(-1)
