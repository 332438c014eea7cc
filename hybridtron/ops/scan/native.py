"""The selective scan by C++ compiled for this CPU (`native/recurrence.h`): a loop over tokens, with SIMD over channels.

Legend: B rows (sequences in a batch), L tokens, E inner channels, N state entries per channel.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch import Tensor

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import recurrence
from hybridtron.ops.native.tensors import Tokens
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.reference import ScanInputs, initial_state

UNIT = 128  # channels in one unit of work: their decays and states over a chunk fit into the L2 cache


class ScanTask(ctypes.Structure):
    """Arguments of the compiled functions, with the fields of the C++ struct `Recurrence` in recurrence.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "length", "channels", "states", "groups", "unit")),
        ("whole_rows", ctypes.c_int64),
        *((name, Tokens) for name in ("x", "dt", "b", "c", "z", "y")),
        *((name, ctypes.c_void_p) for name in ("starts", "A", "D", "bias", "state", "kept")),
        *((name, Tokens) for name in ("grad_y", "grad_x", "grad_dt", "grad_b", "grad_c", "grad_z")),
        *((name, ctypes.c_void_p) for name in ("grad_A", "grad_D", "grad_bias", "shares")),
    )


class NativeScanRow(NamedTuple):
    """The scan's inputs for the compiled loop.

    A and the state are transposed, so that the channels E are their last axis. `ops.native.recurrence.NativeRow`
    describes the constants.
    """

    x_BLE: Tensor
    dt_BLE: Tensor
    A_NE: Tensor
    b_BLN: Tensor
    c_BLN: Tensor
    D_E: Tensor
    bias_E: Tensor
    z_BLE: Tensor | None
    state_BNE: Tensor

    NAME = "recurrence"
    TASK = ScanTask
    WORTH = 2**18
    UNITS_OF = "channels"

    def sizes(self) -> dict[str, int]:
        rows, length, channels = self.x_BLE.shape
        return {
            "rows": rows, "length": length, "channels": channels, "states": self.state_BNE.shape[1], "groups": 1,
            "unit": min(UNIT, channels),
        }  # fmt: skip


@untraced  # torch.compile can't trace a call of compiled code
def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    wide = wide_type(inputs.x_BLE)
    A_NE = inputs.A_EN.t().to(wide)
    D_E = inputs.D_E.to(wide)
    bias_E = inputs.dt_bias_E.to(wide)
    state_BNE = initial_state(inputs).mT
    row = NativeScanRow(
        inputs.x_BLE, inputs.dt_BLE, A_NE, inputs.B_BLN, inputs.C_BLN, D_E, bias_E, inputs.z_BLE, state_BNE
    )
    y_BLE, last_BNE = recurrence(row, inputs.documents_BL)
    return y_BLE, last_BNE.mT


NATIVE = Implementation("native", selective_scan, "cpu", missing=missing)
