"""Cross-entropy at the output head, with only some tokens' logits in memory at a time.

    logits_t = weight x_t,   loss = sum over unmasked t of  lse_t - logits_t[label_t] + z_loss lse_t^2
    g_t = softmax(logits_t) (1 + 2 z_loss lse_t) - one_hot(label_t)       gradient for logits_t
    weight^T g_t      gradient for x_t
    sum_t g_t x_t^T   gradient for the weight

lse_t is log(sum(exp(logits_t))), with the sum over the vocabulary. For masked t, g_t is 0. The tokens are divided into
chunks. For each chunk, the forward pass computes the logits, the loss, and the gradients for x and the weight. The
backward pass only multiplies these gradients by the incoming gradient of the loss. So three matrix multiplications are
needed: for the logits and for the two gradients. If the backward pass computed the gradients, a fourth matrix
multiplication would have to compute the logits again. Peak memory would not be lower, because the backward pass begins
just after the loss, and would then allocate both gradients.

The saved gradients are as large as x and the weight, however many chunks there are. With several calls per micro-batch,
each call would save a gradient for the weight. So all tokens in a micro-batch are passed in one call.

Autograd treats the weight's gradient like any other gradient. So tied weights, several micro-batches and Megatron's
gradient accumulation work as usual. With several chunks, the weight's gradient is accumulated in fp32, in the order of
the chunks.

Legend: T any leading token axes, N number of tokens, C tokens per chunk, D channels of x, V entries of the vocabulary
or of a rank's vocabulary shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.loss.reference import LinearCrossEntropyInputs, Loss, linear_cross_entropy
from hybridtron.ops.precision import wide_type
from hybridtron.ops.product import ProductInputs, matrix_product
from hybridtron.ops.product.sums import add_product
from hybridtron.ops.softmax import SoftmaxGradientsInputs, SoftmaxSumsInputs, softmax_gradients, softmax_sums
from hybridtron.planning.count import logits_at_a_time


def chunked(inputs: LinearCrossEntropyInputs) -> Loss:
    """Return the loss, computed chunk by chunk.

    If the vocabulary is sharded, the gradient for `x_TD` has only the terms from this shard, and the caller has to
    all-reduce it over the shards.
    """
    x_TD, weight_VD, labels_T, mask_T, z_loss, share = inputs
    if not mask_T.numel():  # no tokens, so there is no chunk
        return linear_cross_entropy(inputs)
    recorded = torch.is_grad_enabled()
    wanted = WantedGradients(recorded and x_TD.requires_grad, recorded and weight_VD.requires_grad)
    flat = LinearCrossEntropyInputs(x_TD.flatten(0, -2), weight_VD, labels_T.flatten(), mask_T.flatten(), z_loss, share)
    total, per_token_N = _MadeInForward.apply(wanted, *flat)
    return Loss(total, per_token_N.sum(), mask_T.sum().float(), per_token_N.view(mask_T.shape))


CHUNKED = Implementation("chunked", chunked)


class WantedGradients(NamedTuple):
    """Flags: True for each gradient (for x, for the weight) that autograd needs."""

    of_x: bool
    of_weight: bool


class SummedGradients:
    """Gradients for x (each chunk fills its own rows) and for the weight (summed over chunks), or None if not wanted.

    `several` is True if there is more than one chunk.
    """

    def __init__(self, inputs: LinearCrossEntropyInputs, wanted: WantedGradients, several: bool) -> None:
        self.x_ND = inputs.x_TD
        self.weight_VD = inputs.weight_VD
        self.wanted = wanted
        self.several = several
        if wanted.of_x:
            self.of_x_ND = torch.empty_like(self.x_ND)
        else:
            self.of_x_ND = None
        self.of_weight_VD: Tensor | None = None

    def add(self, part: slice, of_logits_CV: Tensor) -> None:
        """Fill x's gradient for the tokens in `part`, and add to the weight's gradient, given the logits' gradient."""
        x_CD = self.x_ND[part]
        if self.of_x_ND is not None:
            room_CD = self.of_x_ND[part]
            product_CD = matrix_product(ProductInputs(of_logits_CV, self.weight_VD, room_CD))
            if product_CD is not room_CD:
                room_CD.copy_(product_CD)
        if not self.wanted.of_weight:
            return
        if self.of_weight_VD is None:
            self.of_weight_VD = self._first(of_logits_CV.mT, x_CD)
        else:
            add_product(self.of_weight_VD, of_logits_CV.mT, x_CD)

    def _first(self, of_logits_VC: Tensor, x_CD: Tensor) -> Tensor:
        """Return the weight's gradient from the first chunk, in the accumulation's dtype.

        This dtype is x's dtype if there is one chunk, and fp32 (or float64) if there are several chunks.
        """
        wide = wide_type(x_CD) if self.several else x_CD.dtype
        if x_CD.is_cuda and wide != x_CD.dtype:
            return torch.mm(of_logits_VC, x_CD, out_dtype=wide)
        return matrix_product(ProductInputs(of_logits_VC, x_CD)).to(wide)

    def made(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients in x's and the weight's dtypes."""
        of_weight_VD = self.of_weight_VD
        return self.of_x_ND, None if of_weight_VD is None else of_weight_VD.to(self.weight_VD.dtype)


def _sums_of(part: slice, inputs: LinearCrossEntropyInputs, gradients: SummedGradients) -> tuple[Tensor, Tensor]:
    """Return the lse and the label's logit for each token in a chunk, and add the chunk's gradients to `gradients`.

    The chunk's logits exist only during this call.
    """
    x_ND, weight_VD, labels_N, mask_N, z_loss, share = inputs
    logits_CV = matrix_product(ProductInputs(x_ND[part], weight_VD.T))
    if share is None:
        labels_C = labels_N[part]
    else:
        labels_C = labels_N[part] - share.first
    sums = softmax_sums(SoftmaxSumsInputs(logits_CV, labels_C))
    if share is not None:
        sums = share.join(sums)
    lse_C = sums.greatest_C + sums.sum_C.log()
    if any(gradients.wanted):
        gradient_inputs = SoftmaxGradientsInputs(logits_CV, labels_C, mask_N[part], lse_C, z_loss)
        gradients.add(part, softmax_gradients(gradient_inputs))
    return lse_C, sums.picked_C


class _MadeInForward(torch.autograd.Function):
    """Autograd function that computes the gradients in its forward pass, and saves only the gradients."""

    @staticmethod
    def forward(ctx: Any, wanted: WantedGradients, *fields: Any) -> tuple[Tensor, Tensor]:
        inputs = LinearCrossEntropyInputs(*fields)
        x_ND = inputs.x_TD
        mask_N = inputs.mask_T
        z_loss = inputs.z_loss
        tokens = len(x_ND)
        at_a_time = logits_at_a_time(tokens, len(inputs.weight_VD), x_ND.element_size())
        gradients = SummedGradients(inputs, wanted, at_a_time < tokens)
        parts = [slice(start, min(start + at_a_time, tokens)) for start in range(0, tokens, at_a_time)]
        lse, picked = zip(*(_sums_of(part, inputs, gradients) for part in parts), strict=True)
        lse_N = torch.cat(lse)
        per_token_N = torch.where(mask_N, lse_N - torch.cat(picked), 0.0)
        total = (per_token_N + torch.where(mask_N, z_loss * lse_N.square(), 0.0)).sum()
        ctx.save_for_backward(*gradients.made())
        ctx.mark_non_differentiable(per_token_N)
        return total, per_token_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are scaled in place, to save memory. So in a second backward pass, torch raises an error.
        of_x_ND, of_weight_VD = (x if x is None else x.mul_(grad_total) for x in ctx.saved_tensors)
        return None, of_x_ND, of_weight_VD, None, None, None, None
