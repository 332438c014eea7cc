"""The softmax of a loss over many logits, of which only sums are kept, or only gradients.

    sums:       greatest = max_v l_v,   sum = sum_v exp(l_v - greatest),   picked = l_label
    gradients:  l_v <- exp(l_v - lse) (1 + 2 z_loss lse) - [v = label],   0 in masked rows

where lse = greatest + log sum, over all parts of the vocabulary if there are several: between the two ops stands the
exchange with those who hold the other parts. The gradient is that of lse - l_label + z_loss lse^2, as dlse / dl_v is
the softmax.

Legend: C tokens, V vocabulary, or a part of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32

WORKSPACE = 2**18
"""Logits that torch's own operations take at a time: between two of them they stay in a CPU's cache."""


class SoftmaxSumsInputs(NamedTuple):
    """Logits, and labels counted from the first of them."""

    logits_CV: Tensor
    labels_C: Tensor


class SoftmaxGradientsInputs(NamedTuple):
    """The same, which tokens count, and the lse of each."""

    logits_CV: Tensor
    labels_C: Tensor
    mask_C: Tensor
    lse_C: Tensor
    z_loss: float


class SoftmaxSums(NamedTuple):
    """Of each token's logits: the greatest, the sum of exp(logit - greatest), and the label's, 0 if it is not here."""

    greatest_C: Tensor
    sum_C: Tensor
    picked_C: Tensor


def softmax_sums(inputs: SoftmaxSumsInputs) -> SoftmaxSums:
    """What a softmax needs, in fp32 at least; a label that is not in 0..V - 1 is not here."""
    logits_CV, labels_C = inputs
    size = logits_CV.shape[1]
    greatest, sums = [], []
    for part in logits_CV.split(max(1, WORKSPACE // size)):
        wide = at_least_fp32(part)
        greatest.append(wide.amax(-1))
        sums.append((wide - greatest[-1][:, None]).exp_().sum(-1))
    here_C = (labels_C >= 0) & (labels_C < size)
    picked_C = logits_CV.gather(1, torch.where(here_C, labels_C, 0)[:, None]).squeeze(1)
    return SoftmaxSums(torch.cat(greatest), torch.cat(sums), torch.where(here_C, at_least_fp32(picked_C), 0.0))


def softmax_gradients(inputs: SoftmaxGradientsInputs) -> Tensor:
    """The gradients g at the logits, written over the logits; zero in masked rows."""
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
