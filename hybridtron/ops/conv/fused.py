"""The causal convolution in torch alone, with its own backward pass: the reference's sum, in place and by chunks.

With p_t the sum before SiLU and g_t = dy_t silu'(p_t), the gradients are correlations with the taps reversed:

    dx_s = sum_w weight_w g_{s+W-1-w},   dweight_w = sum_t g_t x_{t-W+1+w},   dbias = sum_t g_t

where pairs (s, t) of different documents do not count, as in the forward pass. Backward computes p again instead of
saving it, which would take as much memory as x in fp32.

Legend as in `reference`; K tokens of one chunk, and the R = T + K tokens that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.conv.reference import (
    ConvInputs,
    documents_with_tail,
    masked_at_borders,
    new_tail,
    reached,
    with_tail,
)
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.precision import wide_type

CHUNK = 256  # tokens of a chunk, which stays in a CPU's cache while its taps are summed


@untraced  # a loop of many operations: tracing it takes minutes and gains nothing
def fused(inputs: ConvInputs) -> tuple[Tensor, Tensor]:
    """Sum the taps chunk by chunk; return y and the new tail."""
    if inputs.documents_BL is None:
        documents_BS = None
    else:
        documents_BS = documents_with_tail(inputs.documents_BL, inputs.width)
    return _FusedConv.apply(*inputs._replace(documents_BL=documents_BS)), new_tail(inputs)


FUSED = Implementation("fused", fused)


class _FusedConv(torch.autograd.Function):
    """Autograd function that saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, *fields: Any) -> Tensor:
        x_BLC, weight_CW, bias_C, tail_BTC, documents_BS, activation = fields
        ctx.save_for_backward(*fields[:-1])
        ctx.activation = activation
        weight_WC = weight_CW.t().to(wide_type(x_BLC)).contiguous()
        y_BLC = torch.empty_like(x_BLC, memory_format=torch.contiguous_format)
        for tokens, x_BRC, documents_BR in _chunks(x_BLC, tail_BTC, documents_BS, len(weight_WC)):
            sum_BKC = _sum_of_taps(x_BRC, weight_WC, bias_C, documents_BR)
            if activation:
                y_BLC[:, tokens] = F.silu(sum_BKC, inplace=True)
            else:
                y_BLC[:, tokens] = sum_BKC
        return y_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        x_BLC, weight_CW, bias_C, tail_BTC, documents_BS = ctx.saved_tensors
        weight_WC = weight_CW.t().to(wide_type(x_BLC)).contiguous()
        width = len(weight_WC)
        grad_weight_WC = torch.zeros_like(weight_WC)
        grad_bias_C = torch.zeros_like(weight_WC[0])
        grad_x_BSC = weight_WC.new_zeros(len(x_BLC), x_BLC.shape[1] + width - 1, x_BLC.shape[2])
        for tokens, x_BRC, documents_BR in _chunks(x_BLC, tail_BTC, documents_BS, width):
            grad_BKC = grad_y_BLC[:, tokens].to(weight_WC.dtype)
            if ctx.activation:
                sum_BKC = _sum_of_taps(x_BRC, weight_WC, bias_C, documents_BR)
                grad_BKC = torch.ops.aten.silu_backward(grad_BKC, sum_BKC)
            grad_bias_C += grad_BKC.sum((0, 1))
            for tap in range(width):
                grad_tap_BKC = masked_at_borders(grad_BKC, documents_BR, tap, width)
                reached = slice(tap, tap + grad_BKC.shape[1])
                grad_x_BSC[:, tokens.start :][:, reached].addcmul_(grad_tap_BKC, weight_WC[tap])
                grad_weight_WC[tap] += (grad_tap_BKC * x_BRC[:, reached]).sum((0, 1))
        return (
            grad_x_BSC[:, width - 1 :].to(x_BLC.dtype),
            grad_weight_WC.t().to(weight_CW.dtype),
            None if bias_C is None else grad_bias_C.to(bias_C.dtype),
            None if tail_BTC is None else grad_x_BSC[:, : width - 1].to(tail_BTC.dtype),
            None,
            None,
        )


def _chunks(
    x_BLC: Tensor, tail_BTC: Tensor | None, documents_BS: Tensor | None, width: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield each chunk's tokens, the inputs that its taps read, and the documents of these inputs."""
    for start in range(0, x_BLC.shape[1], CHUNK):
        tokens = slice(start, start + CHUNK)
        x_BRC = x_BLC[:, max(start - (width - 1), 0) : tokens.stop]
        if start == 0:
            x_BRC = with_tail(x_BRC, tail_BTC, width)
        if documents_BS is None:
            documents_BR = None
        else:
            documents_BR = documents_BS[:, start : tokens.stop + width - 1]
        yield tokens, x_BRC.to(wide_type(x_BLC)), documents_BR


def _sum_of_taps(x_BRC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, documents_BR: Tensor | None) -> Tensor:
    width = len(weight_WC)
    sum_BKC = reached(x_BRC, documents_BR, 0, width) * weight_WC[0]
    for tap in range(1, width):
        sum_BKC.addcmul_(reached(x_BRC, documents_BR, tap, width), weight_WC[tap])
    if bias_C is None:
        return sum_BKC
    return sum_BKC.add_(bias_C)
