"""Gated linear attention compiled for this CPU: blocks of tokens by products in the cache (`native/gla.h`).

Legend: as in `reference`; Q value size, padded to full vectors.
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
    """Arguments of the compiled functions: `Gla` in gla.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "keys", "values")),
        *((name, Tokens) for name in ("q", "k", "v", "g", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_q", "grad_k", "grad_v", "grad_g")),
    )


class NativeGLARow(NamedTuple):
    """Inputs of the compiled recurrence, in the order of their gradients; a `NativeRow`."""

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


@untraced  # the compiled function is not an operation of torch
def gla_scan(inputs: GLAInputs) -> tuple[Tensor, Tensor]:
    q_BLHN, k_BLHN, v_BLHP, g_BLHN, _, documents_BL = inputs
    return matrix_recurrence(NativeGLARow(v_BLHP, q_BLHN, k_BLHN, g_BLHN, initial_state(inputs)), documents_BL)


NATIVE = Implementation("native", gla_scan, "cpu", missing=missing)
