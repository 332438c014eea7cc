"""Mamba-2's scan by C++ compiled for this CPU (`native/ssd.h`): matrix multiplications over chunks that fit in a cache.

Legend: B rows (sequences in a batch), L tokens, H heads, P head size, G groups, N state size, Q head size padded to
full SIMD vectors. The compiled code stores states as (B, H, N, Q).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import matrix_recurrence
from hybridtron.ops.native.tensors import Tokens
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs, initial_state

UNIT = 256  # maximum channels (heads * P) per unit of work; a unit's heads share C B^T, so it is computed once per unit


class SSDTask(ctypes.Structure):
    """Arguments of the compiled functions, with the fields of the C++ struct `Ssd` in ssd.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "heads", "size", "groups", "states", "unit")),
        ("whole_rows", ctypes.c_int64),
        *((name, Tokens) for name in ("x", "dt", "b", "c", "y", "step", "own")),
        *((name, ctypes.c_void_p) for name in ("starts", "A", "D", "bias", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_x", "grad_dt", "grad_b", "grad_c", "grad_step", "grad_own")),
        *((name, ctypes.c_void_p) for name in ("grad_A", "grad_D", "grad_bias", "shares")),
    )


class NativeSSDRow(NamedTuple):
    """Inputs of `ssd_scan` or `decay_scan` for the compiled code.

    For `ssd_scan`, `step` and `own` are None. For `decay_scan`, `x`, `b` and `c` hold v, k and q, `dt` holds the log
    decays, A and bias are None, and `step` and `own` hold `step` and `own_step` (None for 1).
    `ops.native.recurrence.NativeRow` describes the constants.
    """

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor | None
    b_BLGN: Tensor
    c_BLGN: Tensor
    D_H: Tensor | None
    bias_H: Tensor | None
    step_BLH: Tensor | None
    own_BLH: Tensor | None
    state_BHNQ: Tensor

    NAME = "ssd"
    TASK = SSDTask
    WORTH = 2**18
    UNITS_OF = "heads"

    def sizes(self) -> dict[str, int]:
        rows, length, heads, size = self.x_BLHP.shape
        groups, states = self.b_BLGN.shape[2:]
        of_group = heads // groups
        unit = max(k for k in range(1, of_group + 1) if of_group % k == 0 and k <= max(1, UNIT // size))
        return {
            "rows": rows, "length": length, "heads": heads, "size": size, "groups": groups, "states": states,
            "unit": unit,
        }  # fmt: skip


@untraced  # torch.compile can't trace a call of compiled code
def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    x_BLHP = inputs.x_BLHP
    B_BLGN = inputs.B_BLGN
    wide = wide_type(inputs.x_BLHP)
    A_H, D_H, dt_bias_H = (t.to(wide) for t in (inputs.A_H, inputs.D_H, inputs.dt_bias_H))
    state_BHNP = initial_state(x_BLHP, B_BLGN, inputs.state_BHPN).mT
    row = NativeSSDRow(x_BLHP, inputs.dt_BLH, A_H, B_BLGN, inputs.C_BLGN, D_H, dt_bias_H, None, None, state_BHNP)
    y_BLHP, last_BHNP = matrix_recurrence(row, inputs.documents_BL)
    return y_BLHP, last_BHNP.mT


@untraced
def decay_scan(inputs: DecayInputs) -> tuple[Tensor, Tensor]:
    q_BLGN, k_BLGN, v_BLHP, g_BLH, state_BHPN, documents_BL, step_BLH, own_step_BLH, D_H = inputs
    state_BHNP = initial_state(v_BLHP, k_BLGN, state_BHPN).mT
    D_H = None if D_H is None else D_H.to(state_BHNP.dtype)
    row = NativeSSDRow(v_BLHP, g_BLH, None, k_BLGN, q_BLGN, D_H, None, step_BLH, own_step_BLH, state_BHNP)
    y_BLHP, last_BHNP = matrix_recurrence(row, documents_BL)
    return y_BLHP, last_BHNP.mT


NATIVE = Implementation("native", ssd_scan, "cpu", missing=missing)
NATIVE_DECAY = Implementation("native", decay_scan, "cpu", missing=missing)
