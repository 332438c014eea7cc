"""Gated linear attention by C++ compiled for this CPU (`native/gla.h`): matrix multiplications for blocks of tokens.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, Q value channels
padded to full SIMD vectors.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.gla.reference import GLAInputs, initial_state
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import matrix_recurrence
from hybridtron.ops.native.tensors import Tokens


class GLATask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Gla` in gla.h.

    rows, length, heads, keys, values: B, L, H, N, P
    q, k, v, g, y: inputs and output
    starts: mask, True for tokens that begin a document
    state: input and output. The forward pass replaces the state before the row by the state after the row. The backward
        pass replaces the gradient for the state after the row by the gradient for the state before the row.
    kept: the state before each token chunk; the forward pass stores it for the backward pass
    grad_...: gradients
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "keys", "values")),
        *((name, Tokens) for name in ("q", "k", "v", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_g")),
    )


class NativeGLARow(NamedTuple):
    """The op's inputs, as the `NativeRow` that `matrix_recurrence` takes. Gradients have the order of these fields."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    g_BLHN: Tensor
    state_BHNQ: Tensor

    NAME = "gla"
    TASK = GLATask
    WORTH = 2**18
    UNITS_OF = ""

    def sizes(self) -> dict[str, int]:
        rows, length, heads, keys = self.k_BLHN.shape
        return {"rows": rows, "length": length, "heads": heads, "keys": keys, "values": self.v_BLHP.shape[3]}


@untraced  # torch.compile can't trace a function in C++
def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    q_BLHN, k_BLHN, v_BLHP, g_BLHN, _, documents_BL = inputs
    return matrix_recurrence(NativeGLARow(v_BLHP, q_BLHN, k_BLHN, g_BLHN, initial_state(inputs)), documents_BL)


NATIVE = Implementation("native", gla_scan, "cpu", missing=missing)
