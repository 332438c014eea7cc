"""The delta rule by this project's Triton kernels (`kernels`).

The kernels take the state before a row and return the state after it. They support several documents in a row, and are
deterministic. Results were compared with the reference in Triton's interpreter and on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_KEYS = 128  # maximum key channels per head: one program of `walk` keeps all of them in registers
MOST_VALUES = 256  # maximum value channels per head


def _unsupported_reason(inputs: DeltaInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > MOST_KEYS or values > MOST_VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {MOST_KEYS} and {MOST_VALUES}"
    return None


TRITON = own_kernels("hybridtron.ops.delta.kernels:delta_scan", _unsupported_reason)
