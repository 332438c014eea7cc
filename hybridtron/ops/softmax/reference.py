"""The softmax of a loss over a large vocabulary, as two ops that keep only its sums, or only its gradients.

    sums:       greatest = max_v l_v,   sum = sum_v exp(l_v - greatest),   picked = l_label
    gradients:  l_v <- exp(l_v - lse) (1 + 2 z_loss lse) - [v = label],   0 in masked rows

where lse = greatest + log sum. If ranks hold parts of the vocabulary, they reduce their sums between the two ops, so
that lse covers all parts. The gradient is that of lse - l_label + z_loss lse^2, as dlse / dl_v is the softmax.

Legend: C tokens, V vocabulary, or a part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

WORKSPACE = 2**18
"""Logits that are processed at a time: so few that they stay in a CPU's cache from one operation to the next."""


class SoftmaxSumsInputs(NamedTuple):
    """Logits, and labels as indices relative to the first logit."""

    logits_CV: Tensor
    labels_C: Tensor


class SoftmaxGradientsInputs(NamedTuple):
    """Logits, labels relative to the first logit, the loss mask, and each token's lse."""

    logits_CV: Tensor
    labels_C: Tensor
    mask_C: Tensor
    lse_C: Tensor
    z_loss: float


class SoftmaxSums(NamedTuple):
    """Each token's largest logit, sum of exp(logit - largest), and label logit (0 if the label is not in this part)."""

    greatest_C: Tensor
    sum_C: Tensor
    picked_C: Tensor


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    """Return each token's sums, in fp32 or float64; a label outside 0..V - 1 is in another part of the vocabulary."""
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
    """Overwrite the logits with their gradients, zero in masked rows, and return them."""
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
