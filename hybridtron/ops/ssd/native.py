"""The scan of Mamba-2 compiled for this CPU: a loop over tokens with vectors of channels (`native/recurrence.h`).

It takes fewer operations than the products over chunks that suit a GPU: their scores between all tokens of a chunk cost
as much as the states do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.native.library import missing
from hybridtron.ops.native.recurrence import RecurrenceInputs, recurrence
from hybridtron.ops.precision import wide_type
from hybridtron.ops.ssd.reference import SSDInputs, initial_state


@torch.compiler.disable  # what is called is no operation of torch
def ssd_scan(inputs: SSDInputs) -> tuple[Tensor, Tensor]:
    """States are (B, N, H P) for the compiled loop: channels side by side in memory."""
    x_BLHP, wide = inputs.x_BLHP, wide_type(inputs.x_BLHP)
    state_BHPN = initial_state(inputs)
    given = RecurrenceInputs(
        state_BHPN.flatten(1, 2).mT,
        x_BLHP.flatten(2),
        inputs.dt_BLH,
        inputs.A_H.to(wide),
        inputs.B_BLGN.flatten(2),
        inputs.C_BLGN.flatten(2),
        inputs.D_H.to(wide),
        inputs.dt_bias_H.to(wide),
        None,
    )
    y_BLE, last_BNE = recurrence(given, inputs.documents_BL, inputs.B_BLGN.shape[2])
    return y_BLE.unflatten(2, x_BLHP.shape[2:]), last_BNE.mT.unflatten(1, x_BLHP.shape[2:])


NATIVE = Implementation("native", ssd_scan, "cpu", missing=missing)
