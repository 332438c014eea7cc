"""The delta rule by C++ compiled for this CPU (`native/delta.h`), chunk by chunk as in `chunked.py`.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels, Q value channels
padded to full SIMD vectors, G = N or 1 (a decay per key channel or per head).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from hybridtron.ops.delta.reference import DeltaInputs, initial_state
from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import matrix_recurrence
from hybridtron.ops.native.tensors import Tokens


class DeltaTask(ctypes.Structure):
    """Arguments for the compiled functions, laid out as the struct `Delta` in delta.h.

    rows, length, heads, size, states, gates: B, L, H, P, N, G
    q, k, v, beta, g, y: inputs and output
    starts: mask, True for tokens that begin a document
    state: input and output. The forward pass replaces the state before the row by the state after the row. The backward
        pass replaces the gradient for the state after the row by the gradient for the state before the row.
    kept: the state before each token chunk; the forward pass stores it for the backward pass
    grad_...: gradients
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "states", "gates")),
        *((name, Tokens) for name in ("q", "k", "v", "beta", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_beta", "grad_g")),
    )


class NativeDeltaRow(NamedTuple):
    """The op's inputs, as the `NativeRow` that `matrix_recurrence` takes. Gradients have the order of these fields."""

    v_BLHP: Tensor
    q_BLHN: Tensor
    k_BLHN: Tensor
    beta_BLH: Tensor
    g_BLHG: Tensor
    state_BHNQ: Tensor

    NAME = "delta"
    TASK = DeltaTask
    WORTH = 2**17
    UNITS_OF = ""

    def sizes(self) -> dict[str, int]:
        rows, length, heads, size = self.v_BLHP.shape
        states = self.k_BLHN.shape[3]
        gates = self.g_BLHG.shape[3]
        return {"rows": rows, "length": length, "heads": heads, "size": size, "states": states, "gates": gates}


@untraced  # torch.compile can't trace a function in C++
def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, _, documents_BL = inputs
    row = NativeDeltaRow(v_BLHP, q_BLHN, k_BLHN, beta_BLH, g_BLHG, initial_state(inputs))
    return matrix_recurrence(row, documents_BL)


NATIVE = Implementation("native", delta_scan, "cpu", missing=missing)
