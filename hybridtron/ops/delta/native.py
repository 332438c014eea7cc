"""The delta rule compiled for this CPU: a triangular system and products in the cache (`native/delta.h`).

Legend: as in `reference`; Q value size, padded to full vectors.
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
    """Arguments of the compiled functions: `Delta` in delta.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "states", "gates")),
        *((name, Tokens) for name in ("q", "k", "v", "beta", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_beta", "grad_g")),
    )


class NativeDeltaRow(NamedTuple):
    """Inputs of the compiled recurrence, in the order of their gradients; a `NativeRow`."""

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


@untraced  # the compiled function is not an operation of torch
def delta_scan(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    q_BLHN, k_BLHN, v_BLHP, beta_BLH, g_BLHG, _, documents_BL = inputs
    row = NativeDeltaRow(v_BLHP, q_BLHN, k_BLHN, beta_BLH, g_BLHG, initial_state(inputs))
    return matrix_recurrence(row, documents_BL)


NATIVE = Implementation("native", delta_scan, "cpu", missing=missing)
