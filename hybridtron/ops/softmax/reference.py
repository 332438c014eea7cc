"""The softmax of the language-model loss as two ops, neither of which stores the probabilities.

    softmax_sums:       greatest = max_v l_v,   sum = sum_v exp(l_v - greatest),   picked = l_label
    softmax_gradients:  l_v <- exp(l_v - lse) (1 + 2 z_loss lse) - [v = label],   0 for tokens outside the loss mask

l are a token's logits, and <- means that the logits are overwritten. [v = label] is 1 if v is the label, else 0.
Between the two ops the caller computes lse = greatest + log sum. If ranks hold shards of the vocabulary, the caller
first combines all ranks' sums, so that lse covers the full vocabulary. The second op computes the gradient of the
token's loss, which is lse - l_label + z_loss lse^2.

Legend: C tokens, V entries in the vocabulary or in this rank's shard.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

WORKSPACE = 2**18
"""Maximum number of logits that are processed at a time, so that they stay in a CPU's cache between operations."""


class SoftmaxSumsInputs(NamedTuple):
    """Logits for this rank's shard of the vocabulary, and labels as indices relative to the shard's first token."""

    logits_CV: Tensor
    labels_C: Tensor


class SoftmaxGradientsInputs(NamedTuple):
    """Inputs to `softmax_gradients`.

    logits_CV, labels_C   the inputs to `softmax_sums`
    mask_C                the loss mask; True: the token counts in the loss
    lse_C                 each token's log-sum-exp over the full vocabulary
    z_loss                the factor for the z-loss
    """

    logits_CV: Tensor
    labels_C: Tensor
    mask_C: Tensor
    lse_C: Tensor
    z_loss: float


class SoftmaxSums(NamedTuple):
    """Each token's largest logit, summed exp(logit - largest), and label logit (0 if it is in another rank's shard)."""

    greatest_C: Tensor
    sum_C: Tensor
    picked_C: Tensor


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    """Return each token's sums, in fp32 (float64 for float64 logits).

    A label outside 0..V - 1 belongs to another rank's vocabulary shard.
    """
    logits_CV, labels_C = inputs
    size = logits_CV.shape[1]
    greatest = []
    sums = []
    for part in logits_CV.split(max(1, WORKSPACE // size)):
        wide = at_least_fp32(part)
        greatest.append(wide.amax(-1))
        sums.append((wide - greatest[-1][:, None]).exp_().sum(-1))
    here_C = (labels_C >= 0) & (labels_C < size)
    picked_C = logits_CV.gather(1, torch.where(here_C, labels_C, 0)[:, None]).squeeze(1)
    return SoftmaxSums(torch.cat(greatest), torch.cat(sums), torch.where(here_C, at_least_fp32(picked_C), 0.0))


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    """Overwrite the logits with their gradients, and return them. Tokens outside the loss mask get gradients of 0."""
    logits_CV, labels_C, mask_C, lse_C, z_loss = inputs
    size = logits_CV.shape[1]
    parts = (x.split(max(1, WORKSPACE // size)) for x in (logits_CV, labels_C, mask_C, lse_C))
    for logits, labels, mask, lse in zip(*parts, strict=True):
        in_place = logits.dtype == lse.dtype
        wide = (logits.sub_(lse[:, None]) if in_place else logits - lse[:, None]).exp_()
        if z_loss:
            wide.mul_((1 + 2 * z_loss * lse)[:, None])
        here = (labels >= 0) & (labels < size)
        label = torch.where(here, labels, 0)[:, None]
        wide.scatter_(1, label, wide.gather(1, label) - here[:, None].to(wide.dtype))
        wide.masked_fill_(~mask[:, None], 0.0)
        if not in_place:
            logits.copy_(wide)
    return logits_CV
