"""The short causal convolution before a state space layer: every channel has its own W taps.

    y_t = bias + weight_0 x_{t-W+1} + ... + weight_{W-1} x_t,  then SiLU if asked for

Taps that would reach into another document read zero. The tail (the last W - 1 inputs of the row before) belongs to
the row's first document; the new tail holds inputs of the row's last document only, and zeros before it.
Not here: long or dilated convolutions, and mixing of channels. The `causal-conv1d` form has been tested against a
stand-in for that package only; it is unmeasured on a GPU.

Legend: B rows, L tokens, C channels, W width of the convolution, T = W - 1 tokens of tail, S = T + L. K tokens of
one chunk, and R = T + K those that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.device import optional_package
from hybridtron.ops.dispatch import op

CHUNK = 256  # tokens whose taps are summed while they are in the cache
CAUSAL_CONV1D = "causal_conv1d"


@op
def causal_conv(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the tail for the row that follows."""
    wide, width = _wide(x_BLC), weight_CW.shape[1]
    x_BSC = _with_tail(x_BLC, tail_BTC, width).to(wide)
    documents_BS = None if documents_BL is None else _with_tail_documents(documents_BL, width)
    y_BLC = x_BSC.new_zeros(x_BLC.shape)
    for tap in range(width):
        y_BLC = y_BLC + weight_CW[:, tap].to(wide) * _reached(x_BSC, documents_BS, tap, width)
    if bias_C is not None:
        y_BLC = y_BLC + bias_C.to(wide)
    if activation:
        y_BLC = F.silu(y_BLC)
    return y_BLC.to(x_BLC.dtype), new_tail(x_BLC, tail_BTC, documents_BL, width)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _with_tail(x_BLC: Tensor, tail_BTC: Tensor | None, width: int) -> Tensor:
    if tail_BTC is None:
        return F.pad(x_BLC, (0, 0, width - 1, 0))
    return torch.cat([tail_BTC.to(x_BLC.dtype), x_BLC], dim=1)


def _with_tail_documents(documents_BL: Tensor, width: int) -> Tensor:
    """The tail's tokens count to the row's first document."""
    return torch.cat([documents_BL[:, :1].expand(-1, width - 1), documents_BL], dim=1)


def _reached(x_BSC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """What a tap reads for each token: the input W - 1 - tap tokens before, or zero out of another document."""
    end = x_BSC.shape[1] - (width - 1) + tap
    return _cut(x_BSC[:, tap:end], documents_BS, tap, width)


def _cut(tensor_BLC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """Zero where a tap reaches from one document into another."""
    if documents_BS is None or tap == width - 1:
        return tensor_BLC
    length = tensor_BLC.shape[1]
    other_BL = documents_BS[:, tap : tap + length] != documents_BS[:, width - 1 :]
    return tensor_BLC.masked_fill(other_BL.unsqueeze(2), 0)


def new_tail(x_BLC: Tensor, tail_BTC: Tensor | None, documents_BL: Tensor | None, width: int) -> Tensor:
    """The last W - 1 inputs, copied: a view would keep the whole row in memory."""
    recent = slice(max(x_BLC.shape[1] - (width - 1), 0), None)
    x_BTC = _with_tail(x_BLC[:, recent], tail_BTC, width)[:, -(width - 1) :]
    if documents_BL is None:
        return x_BTC.clone()
    documents_BT = _with_tail_documents(documents_BL[:, recent], width)[:, -(width - 1) :]
    return x_BTC.masked_fill((documents_BT != documents_BL[:, -1:]).unsqueeze(2), 0)


# ---- causal-conv1d: the package's CUDA kernel


def _causal_conv1d_refuses(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> str | None:
    if documents_BL is not None and tail_BTC is not None:
        return "the kernel takes document borders or a tail, not both"
    if not 2 <= weight_CW.shape[1] <= 4:
        return f"the kernel takes widths of 2 to 4, not {weight_CW.shape[1]}"
    if x_BLC.shape[2] % 8 != 0:
        return f"the kernel takes a multiple of 8 channels, not {x_BLC.shape[2]}"
    return "the kernel has no float64" if x_BLC.dtype == torch.float64 else None


def _causal_conv1d_repeats() -> bool:
    """From 1.6 on it adds up the gradient of its weight in a fixed order when torch is told to."""
    version = str(getattr(optional_package(CAUSAL_CONV1D).module, "__version__", "0"))
    return [int(part) for part in version.split(".")[:2]] >= [1, 6]


@causal_conv.form(
    "causal-conv1d",
    device="cuda",
    package=CAUSAL_CONV1D,
    refuses=_causal_conv1d_refuses,
    repeats=_causal_conv1d_repeats,
)
def _causal_conv1d(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    """Channels stay innermost: the layout for which the kernel takes a tail or document borders."""
    aligned = x_BLC.stride(2) == 1 and x_BLC.stride(1) % 8 == 0 and x_BLC.stride(0) % 8 == 0
    package = optional_package(CAUSAL_CONV1D).module
    assert package is not None
    y_BCL = package.causal_conv1d_fn(
        (x_BLC if aligned else x_BLC.contiguous()).transpose(1, 2),
        weight_CW,
        None if bias_C is None else bias_C.to(weight_CW.dtype),
        seq_idx=None if documents_BL is None else documents_BL.to(torch.int32).contiguous(),
        initial_states=None if tail_BTC is None else tail_BTC.to(x_BLC.dtype).contiguous().transpose(1, 2),
        activation="silu" if activation else None,
    )
    return y_BCL.transpose(1, 2), new_tail(x_BLC, tail_BTC, documents_BL, weight_CW.shape[1])


# ---- fused: pure torch, with its own backward


@causal_conv.form("fused")
@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def _fused(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    """The reference's sum in place, chunk by chunk; backward sums again instead of keeping what SiLU read."""
    width = weight_CW.shape[1]
    documents_BS = None if documents_BL is None else _with_tail_documents(documents_BL, width)
    y_BLC = _FusedConv.apply(x_BLC, weight_CW, bias_C, tail_BTC, documents_BS, activation)
    return y_BLC, new_tail(x_BLC, tail_BTC, documents_BL, width)


class _FusedConv(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        tail_BTC: Tensor | None,
        documents_BS: Tensor | None,
        activation: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_BLC, weight_CW, bias_C, tail_BTC, documents_BS)
        ctx.activation = activation
        weight_WC = weight_CW.t().to(_wide(x_BLC)).contiguous()
        y_BLC = torch.empty_like(x_BLC, memory_format=torch.contiguous_format)
        for tokens, x_BRC, documents_BR in _chunks(x_BLC, tail_BTC, documents_BS, len(weight_WC)):
            sum_BKC = _sum_of_taps(x_BRC, weight_WC, bias_C, documents_BR)
            y_BLC[:, tokens] = F.silu(sum_BKC, inplace=True) if activation else sum_BKC
        return y_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLC: Tensor) -> tuple[Tensor | None, ...]:
        x_BLC, weight_CW, bias_C, tail_BTC, documents_BS = ctx.saved_tensors
        weight_WC = weight_CW.t().to(_wide(x_BLC)).contiguous()
        width = len(weight_WC)
        grad_weight_WC, grad_bias_C = torch.zeros_like(weight_WC), torch.zeros_like(weight_WC[0])
        grad_x_BSC = weight_WC.new_zeros(len(x_BLC), x_BLC.shape[1] + width - 1, x_BLC.shape[2])
        for tokens, x_BRC, documents_BR in _chunks(x_BLC, tail_BTC, documents_BS, width):
            grad_BKC = grad_y_BLC[:, tokens].to(weight_WC.dtype)
            if ctx.activation:
                sum_BKC = _sum_of_taps(x_BRC, weight_WC, bias_C, documents_BR)
                grad_BKC = torch.ops.aten.silu_backward(grad_BKC, sum_BKC)
            grad_bias_C += grad_BKC.sum((0, 1))
            for tap in range(width):
                grad_tap_BKC = _cut(grad_BKC, documents_BR, tap, width)
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
    """The tokens of each chunk, with the inputs that its taps read and their documents."""
    for start in range(0, x_BLC.shape[1], CHUNK):
        tokens = slice(start, start + CHUNK)
        x_BRC = x_BLC[:, max(start - (width - 1), 0) : tokens.stop]
        if start == 0:
            x_BRC = _with_tail(x_BRC, tail_BTC, width)
        documents_BR = None if documents_BS is None else documents_BS[:, start : tokens.stop + width - 1]
        yield tokens, x_BRC.to(_wide(x_BLC)), documents_BR


def _sum_of_taps(x_BRC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, documents_BR: Tensor | None) -> Tensor:
    width = len(weight_WC)
    sum_BKC = _reached(x_BRC, documents_BR, 0, width) * weight_WC[0]
    for tap in range(1, width):
        sum_BKC.addcmul_(_reached(x_BRC, documents_BR, tap, width), weight_WC[tap])
    return sum_BKC if bias_C is None else sum_BKC.add_(bias_C)
