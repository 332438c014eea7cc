"""Next-token cross-entropy, with a z-loss that keeps the softmax's normalizer near 1.

    loss = sum over unmasked tokens t:  lse - logits[label] + z_loss * lse^2,   lse = log sum_v exp(logits[v])

Losses are sums over tokens, not means: the caller adds them up over micro-batches and ranks, and finally divides by the
number of tokens. Both losses in this file have all tokens' logits in memory at once: `cross_entropy` gets them, and
`linear_cross_entropy` computes them from x and the weight. Training uses `chunked.py`, which computes the logits of one
chunk of tokens at a time.

Legend: T any leading token axes, D channels of x, V entries of the vocabulary or of a rank's vocabulary shard.
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
    """Results of the loss. Only `total` is differentiable."""

    total: Tensor  # cross-entropy plus z-loss, summed over the unmasked tokens
    cross_entropy: Tensor  # summed over the unmasked tokens
    tokens: Tensor  # number of unmasked tokens
    per_token: Tensor  # cross-entropy of each token; 0 for masked tokens


class CrossEntropyInputs(NamedTuple):
    """Logits, labels, and a mask: True for tokens that count. Other tokens may have any logits and labels."""

    logits_TV: Tensor
    labels_T: Tensor
    mask_T: Tensor
    z_loss: float


class VocabularyShare(NamedTuple):
    """A rank's vocabulary shard.

    first: the shard's first vocabulary entry
    join: function that combines the shard's softmax sums with the other shards' sums
    """

    first: int
    join: Callable[[SoftmaxSums], SoftmaxSums]


class LinearCrossEntropyInputs(NamedTuple):
    """x and the weight, from which the logits are computed, and labels and mask as in `CrossEntropyInputs`.

    The weight has a row for each entry of the vocabulary shard `share`, or of the full vocabulary if `share` is None.
    A masked token's x does not change the loss, and gets the gradient 0. But it must be finite, because it is
    multiplied by 0 in the weight's gradient, and 0 times infinity or nan is nan.
    """

    x_TD: Tensor
    weight_VD: Tensor
    labels_T: Tensor
    mask_T: Tensor
    z_loss: float
    share: VocabularyShare | None = None


def cross_entropy(inputs: CrossEntropyInputs) -> Loss:
    """Return the loss, computed in fp32 (float64 for float64 logits)."""
    logits_TV, labels_T, mask_T, z_loss = inputs
    # Masked tokens' logits are replaced by 0 before any arithmetic: a multiplication by 0 would keep nan.
    wide_TV = torch.where(mask_T[..., None], at_least_fp32(logits_TV), 0.0)
    lse_T = wide_TV.logsumexp(-1)
    picked_T = wide_TV.gather(-1, torch.where(mask_T, labels_T, 0)[..., None]).squeeze(-1)
    return summed_loss(lse_T, picked_T, mask_T, z_loss)


def linear_cross_entropy(inputs: LinearCrossEntropyInputs) -> Loss:
    """Return the loss. If the vocabulary is sharded, x's gradient has only the terms from this shard."""
    x_TD, weight_VD, labels_T, mask_T, z_loss, share = inputs
    logits_TV = functional.linear(x_TD, weight_VD)
    if share is None:
        return cross_entropy(CrossEntropyInputs(logits_TV, labels_T, mask_T, z_loss))
    wide_TV = torch.where(mask_T[..., None], at_least_fp32(logits_TV), 0.0)
    shard_sums = softmax_sums(SoftmaxSumsInputs(wide_TV.flatten(0, -2), labels_T.flatten() - share.first))
    joined = share.join(SoftmaxSums(*(values.detach() for values in shard_sums)))
    lse_T = (joined.greatest_C + joined.sum_C.log()).view(mask_T.shape)
    # lse = log sum_r exp(lse of shard r), so the gradient of lse with respect to a shard's lse is exp(shard lse - lse).
    # If the label is in this shard, the gradient of `picked` with respect to the shard's picked logit is 1; otherwise
    # this shard has no gradient of `picked`. The joined values carry no gradient. To restore it, terms of the form
    # x - x.detach() are added: their value is 0, and their gradient is x's gradient.
    shard_lse_T = wide_TV.logsumexp(-1)
    shard_part_T = (shard_lse_T - lse_T).exp().detach()
    lse_T = lse_T + shard_part_T * (shard_lse_T - shard_lse_T.detach())
    picked_T = (joined.picked_C + shard_sums.picked_C - shard_sums.picked_C.detach()).view(mask_T.shape)
    return summed_loss(lse_T, picked_T, mask_T, z_loss)


def summed_loss(lse_T: Tensor, picked_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    """Compute the loss from each token's lse and its label's logit."""
    per_token_T = torch.where(mask_T, lse_T - picked_T, 0.0)
    z_T = torch.where(mask_T, z_loss * lse_T.square(), 0.0)
    total = (per_token_T + z_T).sum()
    return Loss(total, per_token_T.detach().sum(), mask_T.sum().float(), per_token_T.detach())
