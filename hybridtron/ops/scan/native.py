"""The selective scan compiled for this CPU: a loop over tokens with vectors of channels (`native/recurrence.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import RecurrenceInputs, recurrence
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan.reference import ScanInputs, initial_state


@torch.compiler.disable  # what is called is no operation of torch
def selective_scan(inputs: ScanInputs) -> tuple[Tensor, Tensor]:
    """States are (B, N, E) for the compiled loop: channels side by side in memory."""
    wide = wide_type(inputs.x_BLE)
    given = RecurrenceInputs(
        initial_state(inputs).mT,
        inputs.x_BLE,
        inputs.dt_BLE,
        inputs.A_EN.t().to(wide),
        inputs.B_BLN,
        inputs.C_BLN,
        inputs.D_E.to(wide),
        inputs.dt_bias_E.to(wide),
        inputs.z_BLE,
    )
    y_BLE, last_BNE = recurrence(given, inputs.documents_BL)
    return y_BLE, last_BNE.mT


NATIVE = Implementation("native", selective_scan, "cpu", missing=missing)
