"""C++ forms of the ops that choose experts, order the choices, and move rows (`native/experts.cpp`), for this CPU.

A token's scores are compared while they are in the CPU's cache. Rows are read and written once, without copies in
fp32 on the way.

Legend: T tokens, E experts, K experts per token, N = T K choices, D channels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, left_to_torch_compile, untraced
from hybridtron.ops.experts.permutation import ExpertOrder, ExpertOrderInputs, FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.experts.reference import ChoiceInputs
from hybridtron.ops.native.library import call, missing, threads
from hybridtron.ops.native.tensors import Tokens, address, scalar, unsupported_types
from hybridtron.ops.precision import wide_type

WORTH = 2**17  # elements per thread; with fewer elements an additional thread costs more than it saves


class ChoiceTask(ctypes.Structure):
    """Arguments for the compiled choice, with the fields of the C++ struct `Choice` in experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "experts", "top_k", "groups", "group_limit")),
        *((name, ctypes.c_void_p) for name in ("scores", "correction", "chosen")),
    )


class OrderTask(ctypes.Structure):
    """Arguments for the compiled order, with the fields of the C++ struct `Ordered` in experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("count", "experts")),
        *((name, ctypes.c_void_p) for name in ("chosen", "loads", "source", "place", "ends")),
    )


class RowsTask(ctypes.Structure):
    """Arguments for the compiled functions on rows, with the fields of the C++ struct `ExpertRows` in experts.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "channels")),
        *((name, Tokens) for name in ("x", "rows", "grad_x", "grad_rows")),
        *((name, ctypes.c_void_p) for name in ("place", "weights", "grad_weights")),
    )


def _choice_unsupported(inputs: ChoiceInputs) -> str | None:
    if inputs.scores_TE.dtype in (torch.float32, torch.float64):
        return left_to_torch_compile()
    return "takes scores in fp32 and float64"


def _order_unsupported(inputs: ExpertOrderInputs) -> str | None:
    return left_to_torch_compile()


def _to_unsupported(inputs: ToExpertsInputs) -> str | None:
    return left_to_torch_compile() or unsupported_types(inputs.x_TD)


def _from_unsupported(inputs: FromExpertsInputs) -> str | None:
    return left_to_torch_compile() or unsupported_types(inputs.rows_ND)


@untraced  # torch.compile can't trace a call of compiled code
def expert_choice(inputs: ChoiceInputs) -> Tensor:
    scores_TE = inputs.scores_TE.detach().contiguous()
    options = inputs.options
    tokens, experts = scores_TE.shape
    correction_E = None
    if inputs.correction_E is not None:
        correction_E = inputs.correction_E.detach().to(scores_TE.dtype).contiguous()
    experts_TK = torch.empty(tokens, options.top_k, dtype=torch.int64)
    task = ChoiceTask(tokens, experts, options.top_k, options.groups, options.group_limit)
    task.scores, task.correction, task.chosen = map(address, (scores_TE, correction_E, experts_TK))
    call(f"experts_choose_{scalar(scores_TE.dtype)}", task, threads(scores_TE.numel() / WORTH))
    return experts_TK


@untraced
def expert_order(inputs: ExpertOrderInputs) -> ExpertOrder:
    experts_TK = inputs.experts_TK.contiguous()
    loads_E = inputs.loads_E.contiguous()
    place_TK = torch.empty_like(experts_TK)
    source_N = torch.empty(experts_TK.numel(), dtype=torch.int64)
    ends_E = torch.empty(len(loads_E), dtype=torch.int32)
    task = OrderTask(experts_TK.numel(), len(loads_E))
    task.chosen, task.loads, task.source, task.place, task.ends = map(
        address, (experts_TK, loads_E, source_N, place_TK, ends_E)
    )
    call("experts_order", task, 1)
    return ExpertOrder(source_N, place_TK, ends_E)


@untraced
def to_experts(inputs: ToExpertsInputs) -> Tensor:
    return _NativeToExperts.apply(inputs.x_TD, inputs.order.place_TK, inputs.order.slots)


@untraced
def from_experts(inputs: FromExpertsInputs) -> Tensor:
    return _NativeFromExperts.apply(inputs.rows_ND, inputs.weights_TK, inputs.order.place_TK, inputs.order.slots)


CHOICE = Implementation("native", expert_choice, "cpu", unsupported_reason=_choice_unsupported, missing=missing)
ORDER = Implementation("native", expert_order, "cpu", unsupported_reason=_order_unsupported, missing=missing)
TO = Implementation("native", to_experts, "cpu", unsupported_reason=_to_unsupported, missing=missing)
FROM = Implementation("native", from_experts, "cpu", unsupported_reason=_from_unsupported, missing=missing)


class _NativeToExperts(torch.autograd.Function):
    """Autograd function that saves only places."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, place_TK: Tensor, slots: int | None) -> Tensor:
        ctx.save_for_backward(place_TK)
        x_TD = x_TD.contiguous()
        if slots is None:
            rows_ND = x_TD.new_empty(place_TK.numel(), x_TD.shape[1])
        else:
            rows_ND = x_TD.new_zeros(slots, x_TD.shape[1])
        task = _task(x_TD, rows_ND, place_TK)
        call("experts_copy", task, threads(rows_ND.numel() / WORTH))
        return rows_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return _summed(grads[0].contiguous(), place_TK, None), None, None


class _NativeFromExperts(torch.autograd.Function):
    """Autograd function that saves rows, weights and places."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, place_TK: Tensor, slots: int | None) -> Tensor:
        ctx.slots = slots
        rows_ND = rows_ND.contiguous()
        ctx.save_for_backward(rows_ND, weights_TK, place_TK)
        return _summed(rows_ND, place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_ND, weights_TK, place_TK = ctx.saved_tensors
        wide = wide_type(rows_ND)
        grad_TD = grads[0].contiguous()
        if ctx.slots is None:
            grad_rows_ND = torch.empty_like(rows_ND)
        else:
            grad_rows_ND = torch.zeros_like(rows_ND)
        wide_TK = weights_TK.to(wide).contiguous()
        grad_weights_TK = torch.empty_like(wide_TK)
        task = _task(grad_TD, rows_ND, place_TK)
        task.grad_x, task.grad_rows = task.x, Tokens.of(grad_rows_ND[None])
        task.weights, task.grad_weights = wide_TK.data_ptr(), grad_weights_TK.data_ptr()
        call(f"experts_spread_{scalar(wide)}", task, threads(rows_ND.numel() / WORTH))
        return grad_rows_ND, grad_weights_TK.to(weights_TK.dtype), None, None


def _summed(rows_ND: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return each token's sum of rows, weighted if there are weights, added in the order of its choices."""
    wide = wide_type(rows_ND)
    if weights_TK is not None:
        weights_TK = weights_TK.to(wide).contiguous()
    y_TD = rows_ND.new_empty(len(place_TK), rows_ND.shape[1])
    task = _task(y_TD, rows_ND, place_TK)
    task.weights = address(weights_TK)
    call(f"experts_add_{scalar(wide)}", task, threads(rows_ND.numel() / WORTH))
    return y_TD


def _task(x_TD: Tensor, rows_ND: Tensor, place_TK: Tensor) -> RowsTask:
    tokens, top_k = place_TK.shape
    task = RowsTask(tokens, top_k, x_TD.shape[1], Tokens.of(x_TD[None]), Tokens.of(rows_ND[None]))
    task.place = place_TK.data_ptr()
    return task
