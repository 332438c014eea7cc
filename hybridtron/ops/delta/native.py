"""The delta rule compiled for this CPU: a triangular system and products in the cache (`native/delta.h`).

Forward keeps its inputs and the state before every chunk of tokens.

Legend: as in `reference`; K chunks, Q value sizes filled up to whole vectors.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.delta.reference import DeltaInputs, initial_state
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import call, constant, missing, threads
from hybridtron.ops.native.tensors import Tokens, address, like, readable, scalar, starts_of
from hybridtron.ops.precision import wide_type

WORTH = 2**17  # entries of states times tokens that are worth a thread: it takes some 20 us to come and go


class DeltaFields(NamedTuple):
    """What is differentiated, in the order of its gradients."""

    q_BLHN: Tensor
    k_BLHN: Tensor
    v_BLHP: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    state_BHNQ: Tensor


class DeltaTask(ctypes.Structure):
    """`Delta` in delta.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "states", "gates")),
        *((name, Tokens) for name in ("q", "k", "v", "beta", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_beta", "grad_g")),
    )


@torch.compiler.disable  # what is called is no operation of torch
def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    v_BLHP, state_BHNP, size = inputs.v_BLHP, initial_state(inputs), inputs.v_BLHP.shape[3]
    vector = constant("vector_bytes") // wide_type(v_BLHP).itemsize
    state_BHNQ = torch.nn.functional.pad(state_BHNP, (0, -size % vector))
    fields = DeltaFields(*inputs[:5], state_BHNQ)
    y_BLHP, last_BHNQ = _NativeDelta.apply(torch.is_grad_enabled(), starts_of(inputs.documents_BL), *fields)
    return y_BLHP, last_BHNQ[..., :size]


NATIVE = Implementation("native", delta_scan, "cpu", missing=missing)


class _NativeDelta(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, recorded: bool, starts_BL: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        fields = DeltaFields(*(t if t is given[-1] else readable(t) for t in given))
        task = _task(fields, starts_BL)
        last_BHNQ, y_BLHP = fields.state_BHNQ.clone(memory_format=torch.contiguous_format), like(fields.v_BLHP)
        task.state, task.y = last_BHNQ.data_ptr(), Tokens.of(y_BLHP)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BKHNQ = last_BHNQ.new_empty(task.rows, chunks, *last_BHNQ.shape[1:])
            task.kept = kept_BKHNQ.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BKHNQ, *fields)
            ctx.kinds = [tensor.dtype for tensor in given]
        call(f"delta_forward_{scalar(last_BHNQ.dtype)}", task, _threads(task))
        return y_BLHP.to(given[2].dtype), last_BHNQ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHNQ: Tensor) -> tuple[Tensor | None, ...]:
        starts_BL, kept_BKHNQ, *saved = ctx.saved_tensors
        fields = DeltaFields(*saved)
        task, grad_y_BLHP = _task(fields, starts_BL), readable(grad_y_BLHP)
        grad_state_BHNQ = grad_last_BHNQ.clone(memory_format=torch.contiguous_format)
        task.state, task.kept, task.grad_y = grad_state_BHNQ.data_ptr(), kept_BKHNQ.data_ptr(), Tokens.of(grad_y_BLHP)
        found = [like(t) for t in fields[:5]]
        task.grad_q, task.grad_k, task.grad_v, task.grad_beta, task.grad_g = map(Tokens.of, found)
        call(f"delta_backward_{scalar(kept_BKHNQ.dtype)}", task, _threads(task))
        return None, None, *(grad.to(kind) for grad, kind in zip((*found, grad_state_BHNQ), ctx.kinds, strict=True))


def _task(fields: DeltaFields, starts_BL: Tensor | None) -> DeltaTask:
    """What forward and backward are given alike."""
    rows, length, heads, size = fields.v_BLHP.shape
    q, k, v, beta, g = map(Tokens.of, fields[:5])
    return DeltaTask(
        rows=rows, length=length, heads=heads, size=size, states=fields.k_BLHN.shape[3], gates=fields.g_BLHG.shape[3],
        q=q, k=k, v=v, beta=beta, g=g, starts=address(starts_BL),
    )  # fmt: skip


def _threads(task: DeltaTask) -> int:
    return threads(task.rows * task.length * task.heads * task.size * task.states / WORTH)
