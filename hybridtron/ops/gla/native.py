"""Gated linear attention compiled for this CPU: blocks of tokens by products in the cache (`native/gla.h`).

Forward keeps its inputs and the state before every chunk of tokens.

Legend: as in `reference`; K chunks, Q value sizes filled up to whole vectors.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.gla.reference import GLAInputs, initial_state
from hybridtron.ops.native.library import call, constant, missing, threads
from hybridtron.ops.native.tensors import Tokens, address, like, readable, scalar, starts_of

WORTH = 2**18  # states times tokens that are worth a thread: it takes some 20 us to come and go


class GLATask(ctypes.Structure):
    """`Gla` in gla.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "keys", "values")),
        *((name, Tokens) for name in ("q", "k", "v", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_g")),
    )


@torch.compiler.disable  # what is called is no operation of torch
def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    q_BLHN, k_BLHN, v_BLHP, g_BLHN, _, documents_BL = inputs
    state_BHNP, values = initial_state(inputs), v_BLHP.shape[3]
    filled = constant("vector_bytes") // state_BHNP.itemsize
    state_BHNQ = torch.nn.functional.pad(state_BHNP, (0, -values % filled))
    y_BLHP, last_BHNQ = _NativeGLA.apply(
        torch.is_grad_enabled(), starts_of(documents_BL), q_BLHN, k_BLHN, v_BLHP, g_BLHN, state_BHNQ
    )
    return y_BLHP, last_BHNQ[..., :values]


NATIVE = Implementation("native", gla_scan, "cpu", missing=missing)


class _NativeGLA(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, recorded: bool, starts_BL: Tensor | None, *given: Any) -> tuple[Tensor, ...]:
        q, k, v, g = (readable(t) for t in given[:4])
        task, last_BHNQ, y_BLHP = _task(starts_BL, q, k, v, g), given[4].clone(memory_format=_DENSE), like(v)
        task.state, task.y = last_BHNQ.data_ptr(), Tokens.of(y_BLHP)
        if recorded:
            chunks = -(-task.length // constant("chunk_tokens"))
            kept_BKHNQ = last_BHNQ.new_empty(task.rows, chunks, *last_BHNQ.shape[1:])
            task.kept = kept_BKHNQ.data_ptr()
            ctx.save_for_backward(starts_BL, kept_BKHNQ, q, k, v, g)
            ctx.kinds = [tensor.dtype for tensor in given]
        call(f"gla_forward_{scalar(last_BHNQ.dtype)}", task, _threads(task))
        return y_BLHP.to(given[2].dtype), last_BHNQ

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_last_BHNQ: Tensor) -> tuple[Tensor | None, ...]:
        starts_BL, kept_BKHNQ, *tokens = ctx.saved_tensors
        task, grad_y_BLHP = _task(starts_BL, *tokens), readable(grad_y_BLHP)
        grads, grad_state_BHNQ = [like(t) for t in tokens], grad_last_BHNQ.clone(memory_format=_DENSE)
        task.state, task.kept, task.grad_y = grad_state_BHNQ.data_ptr(), kept_BKHNQ.data_ptr(), Tokens.of(grad_y_BLHP)
        task.grad_q, task.grad_k, task.grad_v, task.grad_g = map(Tokens.of, grads)
        call(f"gla_backward_{scalar(kept_BKHNQ.dtype)}", task, _threads(task))
        found = (*grads, grad_state_BHNQ)
        return None, None, *(grad.to(kind) for grad, kind in zip(found, ctx.kinds, strict=True))


_DENSE = torch.contiguous_format


def _task(starts_BL: Tensor | None, q_BLHN: Tensor, k_BLHN: Tensor, v_BLHP: Tensor, g_BLHN: Tensor) -> GLATask:
    """What forward and backward are given alike."""
    (rows, length, heads, keys), values = k_BLHN.shape, v_BLHP.shape[3]
    q, k, v, g = map(Tokens.of, (q_BLHN, k_BLHN, v_BLHP, g_BLHN))
    return GLATask(
        rows=rows, length=length, heads=heads, keys=keys, values=values, q=q, k=k, v=v, g=g, starts=address(starts_BL)
    )


def _threads(task: GLATask) -> int:
    return threads(task.rows * task.length * task.heads * task.keys * task.values / WORTH)
