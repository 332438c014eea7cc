"""Cross-entropy of the head's product, whose logits are made and given up again a number of tokens at a time.

    logits_t = weight x_t,   loss = sum over unmasked t of  lse_t - logits_t[label_t] + z_loss lse_t^2
    g_t = softmax(logits_t) (1 + 2 z_loss lse_t) - one_hot(label_t)       the gradient of the loss at logits_t
    gradients: weight^T g_t of x_t, and sum_t g_t x_t^T of the weight

The gradients are made in the forward pass, from the logits while they are there; backward only scales them. To make
them in backward would cost the logits once more, a fourth product to the three, and save nothing at the peak: the loss
ends a forward pass, and the backward pass that follows at once would begin with these same two gradients. What is kept
is as large as the input and the weight, however many tokens there are, so the tokens of a micro-batch go in together.

The gradient of the weight goes through autograd as any other's, so that tied weights, several micro-batches and
Megatron's sums of gradients know nothing of this. In several parts it is added up in fp32, always in the same order.

Legend: T any leading axes of tokens, N their product, C those of one part, D width, V vocabulary, or a rank's share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hybridtron.ops.dispatch import op
from hybridtron.ops.loss.reference import Loss, cross_entropy
from hybridtron.ops.norm.reference import at_least_fp32
from hybridtron.planning.count import logits_at_a_time

WORKSPACE = 2**18
"""Logits that torch's own operations take at a time: between two of them they stay in a CPU's cache."""


class Sums(NamedTuple):
    """Of each token's logits: the greatest, the sum of exp(logit - greatest), and the label's, 0 if it is not here."""

    greatest_C: Tensor
    sum_C: Tensor
    picked_C: Tensor


class Share(NamedTuple):
    """Which part of the vocabulary is here: from which token on, and how its sums are joined with the other parts'."""

    first: int
    join: Callable[[Sums], Sums]


WHOLE = Share(0, lambda sums: sums)


@op
def linear_cross_entropy(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    """`cross_entropy` of all logits at once; masked labels may be anything."""
    return cross_entropy(functional.linear(x_TD, weight_VD), labels_T, mask_T, z_loss)


@op
def softmax_sums(logits_CV: Tensor, labels_C: Tensor) -> Sums:
    """What a softmax needs, in fp32 at least; a label that is not in 0..V - 1 is not here."""
    size = logits_CV.shape[1]
    greatest, sums = [], []
    for part in logits_CV.split(max(1, WORKSPACE // size)):
        wide = at_least_fp32(part)
        greatest.append(wide.amax(-1))
        sums.append((wide - greatest[-1][:, None]).exp_().sum(-1))
    here_C = (labels_C >= 0) & (labels_C < size)
    picked_C = logits_CV.gather(1, torch.where(here_C, labels_C, 0)[:, None]).squeeze(1)
    return Sums(torch.cat(greatest), torch.cat(sums), torch.where(here_C, at_least_fp32(picked_C), 0.0))


@op
def softmax_gradients(logits_CV: Tensor, labels_C: Tensor, mask_C: Tensor, lse_C: Tensor, z_loss: float) -> Tensor:
    """The gradients g at the logits, written over the logits; zero in masked rows."""
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


class Wanted(NamedTuple):
    """Whose gradients are: the input's, the weight's."""

    of_x: bool
    of_weight: bool


class _Gradients:
    """Those of the input and of the weight, as they are added up over the parts; None where not wanted."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, wanted: Wanted, several: bool) -> None:
        self.x_ND, self.weight_VD, self.wanted, self.several = x_ND, weight_VD, wanted, several
        self.of_x_ND = torch.empty_like(x_ND) if wanted.of_x else None
        self.of_weight_VD: Tensor | None = None

    def add(self, part: slice, of_logits_CV: Tensor) -> None:
        """What some tokens bring."""
        x_CD = self.x_ND[part]
        if self.of_x_ND is not None:
            torch.mm(of_logits_CV, self.weight_VD, out=self.of_x_ND[part])
        if not self.wanted.of_weight:
            return
        if self.of_weight_VD is None:
            of_weight_VD = of_logits_CV.mT @ x_CD
            self.of_weight_VD = at_least_fp32(of_weight_VD) if self.several else of_weight_VD
        elif self.of_weight_VD.dtype == x_CD.dtype:
            self.of_weight_VD.addmm_(of_logits_CV.mT, x_CD)
        else:
            self.of_weight_VD += of_logits_CV.mT @ x_CD

    def made(self) -> tuple[Tensor | None, Tensor | None]:
        """Both, in the types of what they are gradients of."""
        of_weight_VD = self.of_weight_VD
        return self.of_x_ND, None if of_weight_VD is None else of_weight_VD.to(self.weight_VD.dtype)


class _MadeInForward(torch.autograd.Function):
    """Keeps the gradients alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        mask_N: Tensor,
        z_loss: float,
        share: Share,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor]:
        tokens, size = len(x_ND), len(weight_VD)
        at_a_time = logits_at_a_time(tokens, size, x_ND.element_size())
        gradients = _Gradients(x_ND, weight_VD, wanted, at_a_time < tokens)
        all_logits_CV = x_ND.new_empty(at_a_time, size)
        lse, picked = [], []
        for start in range(0, tokens, at_a_time):
            part = slice(start, min(start + at_a_time, tokens))
            logits_CV = torch.mm(x_ND[part], weight_VD.T, out=all_logits_CV[: part.stop - start])
            labels_C = labels_N[part] - share.first
            sums = share.join(softmax_sums(logits_CV, labels_C))
            lse.append(sums.greatest_C + sums.sum_C.log())
            picked.append(sums.picked_C)
            if any(wanted):
                gradients.add(part, softmax_gradients(logits_CV, labels_C, mask_N[part], lse[-1], z_loss))
        lse_N = torch.cat(lse)
        per_token_N = torch.where(mask_N, lse_N - torch.cat(picked), 0.0)
        total = (per_token_N + torch.where(mask_N, z_loss * lse_N.square(), 0.0)).sum()
        ctx.save_for_backward(*gradients.made())
        ctx.mark_non_differentiable(per_token_N)
        return total, per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # in place: torch refuses a second backward pass, whose gradients these would be times both factors
        of_x_ND, of_weight_VD = (x if x is None else x.mul_(grad_total) for x in ctx.saved_tensors)
        return of_x_ND, of_weight_VD, None, None, None, None, None


def chunked(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor, z_loss: float, share: Share) -> Loss:
    """The loss from a share of the vocabulary; the gradient of `x_TD` is this share's part of it."""
    recorded = torch.is_grad_enabled()
    wanted = Wanted(recorded and x_TD.requires_grad, recorded and weight_VD.requires_grad)
    flat = x_TD.flatten(0, -2), weight_VD, labels_T.flatten(), mask_T.flatten()
    total, per_token_N = _MadeInForward.apply(*flat, z_loss, share, wanted)
    return Loss(total, per_token_N.sum(), mask_T.sum().float(), per_token_N.view(mask_T.shape))


@linear_cross_entropy.form("chunked")
def _(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, mask_T: Tensor, z_loss: float) -> Loss:
    return chunked(x_TD, weight_VD, labels_T, mask_T, z_loss, WHOLE)
