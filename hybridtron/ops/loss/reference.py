"""Cross-entropy of next tokens, with the z-loss that keeps the logits' normaliser near 1.

    loss = sum over unmasked tokens of  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Sums, not means: the caller adds up micro-batches and ranks and divides by the number of tokens at the end. Here all
logits exist at once, given or computed from their factors; training uses `chunked`, which never has them all.

Legend: T any leading axes of tokens, D width, V vocabulary, or this rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.softmax.reference import SoftmaxSums, SoftmaxSumsInputs, softmax_sums


class Loss(NamedTuple):
    """Sums over the unmasked tokens, and each token's cross-entropy; only `total` carries a gradient."""

    total: Tensor
    cross_entropy: Tensor
    tokens: Tensor
    per_token: Tensor


class CrossEntropyInputs(NamedTuple):
    """Logits, labels, and a mask of the tokens that count; masked labels and logits may be anything."""

    logits_TV: Tensor
    labels_T: Tensor
    mask_T: Tensor
    z_loss: float


class VocabularyShare(NamedTuple):
    """A rank's vocabulary shard: its first token, and a function that combines its sums with the other shards'."""

    first: int
    join: Callable[[SoftmaxSums], SoftmaxSums]


class LinearCrossEntropyInputs(NamedTuple):
    """The factors of the logits, for a shard of the vocabulary, or for all of it if `share` is None.

    Masked rows of x may be anything for the loss, and their gradient is 0. But the weight's gradient is a product with
    all rows of x, in which masked rows are multiplied by 0: non-finite values there make it nan.
    """

    x_TD: Tensor
    weight_VD: Tensor
    labels_T: Tensor
    mask_T: Tensor
    z_loss: float
    share: VocabularyShare | None = None


def cross_entropy(inputs: CrossEntropyInputs) -> Loss:
    """Sum the cross-entropy and z-loss over tokens whose mask is True, in fp32 at least."""
    logits_TV, labels_T, mask_T, z_loss = inputs
    # Masked rows of logits are replaced before any arithmetic: 0 * nan would still be nan.
    wide_TV = torch.where(mask_T[..., None], at_least_fp32(logits_TV), 0.0)
    lse_T = wide_TV.logsumexp(-1)
    picked_T = wide_TV.gather(-1, torch.where(mask_T, labels_T, 0)[..., None]).squeeze(-1)
    return summed_loss(lse_T, picked_T, mask_T, z_loss)


def linear_cross_entropy(inputs: LinearCrossEntropyInputs) -> Loss:
    """Compute the loss with all logits at once; with a vocabulary shard, gradients are only this shard's terms."""
    x_TD, weight_VD, labels_T, mask_T, z_loss, share = inputs
    logits_TV = functional.linear(x_TD, weight_VD)
    if share is None:
        return cross_entropy(CrossEntropyInputs(logits_TV, labels_T, mask_T, z_loss))
    wide_TV = torch.where(mask_T[..., None], at_least_fp32(logits_TV), 0.0)
    shard_sums = softmax_sums(SoftmaxSumsInputs(wide_TV.flatten(0, -2), labels_T.flatten() - share.first))
    joined = share.join(SoftmaxSums(*(values.detach() for values in shard_sums)))
    lse_T = (joined.greatest_C + joined.sum_C.log()).view(mask_T.shape)
    # As lse = log sum_r exp(lse of shard r), its gradient by a shard's lse is exp(shard lse - lse), by picked 1.
    shard_lse_T = wide_TV.logsumexp(-1)
    shard_part_T = (shard_lse_T - lse_T).exp().detach()
    lse_T = lse_T + shard_part_T * (shard_lse_T - shard_lse_T.detach())
    picked_T = (joined.picked_C + shard_sums.picked_C - shard_sums.picked_C.detach()).view(mask_T.shape)
    return summed_loss(lse_T, picked_T, mask_T, z_loss)


def summed_loss(lse_T: Tensor, picked_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    """Sum the loss, given each token's lse and the logit of its label."""
    per_token_T = torch.where(mask_T, lse_T - picked_T, 0.0)
    z_T = torch.where(mask_T, z_loss * lse_T.square(), 0.0)
    total = (per_token_T + z_T).sum()
    return Loss(total, per_token_T.detach().sum(), mask_T.sum().float(), per_token_T.detach())
