"""The experts' activation in a backward pass, where it is needed again beside its gradient.

    active = act(hidden),   grad hidden = act'(hidden) grad active

The gradient comes in parts along its channels, each a matrix without gaps. The compiled form computes both results in
one pass. In fp32 it returns gate's and up's gradients apart: oneDNN would copy slices (`ops/product/onednn.py`).

Legend: N rows, H hidden channels of an expert, F rows of `gate_up`: 2H or H.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.experts.reference import ExpertActivation, activated
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.tensors import as_rows, unsupported_types
from hybridtron.ops.swiglu import SwiGLUInputs
from hybridtron.ops.swiglu.native import GradientRooms, write_gradients


class ActivatedInputs(NamedTuple):
    """An expert's first projection, the gradient of its activation, and the activation's name."""

    hidden_NF: Tensor
    grad_NH: Tensor
    activation: ExpertActivation


class ActivatedAgain(NamedTuple):
    """The activation (N, H), and parts of the gradient of the first projection (N, F), along F."""

    active_NH: Tensor
    of_hidden: tuple[Tensor, ...]


def activated_again(inputs: ActivatedInputs) -> ActivatedAgain:
    """Return the activation and the gradient of its input, both without gradients of their own."""
    with torch.enable_grad():
        hidden_NF = inputs.hidden_NF.detach().requires_grad_()
        active_NH = activated(hidden_NF, inputs.activation)
    (of_hidden_NF,) = torch.autograd.grad(active_NH, hidden_NF, inputs.grad_NH)
    return ActivatedAgain(active_NH.detach(), (of_hidden_NF,))


def _native(inputs: ActivatedInputs) -> ActivatedAgain:
    hidden_NF, grad_NH, _ = inputs
    active_NH = torch.empty_like(grad_NH, memory_format=torch.contiguous_format)
    if hidden_NF.dtype == torch.float32:
        of_hidden = of_gate_NH, of_up_NH = torch.empty_like(active_NH), torch.empty_like(active_NH)
    else:
        of_hidden = (torch.empty_like(hidden_NF, memory_format=torch.contiguous_format),)
        of_gate_NH, of_up_NH = of_hidden[0].chunk(2, 1)
    rooms = GradientRooms(of_gate_NH[None], of_up_NH[None], active_NH[None])
    write_gradients(SwiGLUInputs(as_rows(hidden_NF)), as_rows(grad_NH), rooms)
    return ActivatedAgain(active_NH, of_hidden)


def _unsupported(inputs: ActivatedInputs) -> str | None:
    if inputs.activation != "swiglu":
        return "for SwiGLU"
    return unsupported_types(inputs.hidden_NF, inputs.grad_NH)


NATIVE = Implementation("native", _native, "cpu", unsupported_reason=_unsupported, missing=missing)
