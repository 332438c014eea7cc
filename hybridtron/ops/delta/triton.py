"""The delta rule by Triton kernels of our own (`kernels`), with states in and out, documents, and reproducible bits.

Compared with the reference in Triton's interpreter, compiled for sm_90, and correct on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.kernel_launch import own_kernels

# of a head; a program holds all keys of a state, for some of its values
MOST_KEYS = 128
MOST_VALUES = 256


def _unsupported_reason(inputs: DeltaInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > MOST_KEYS or values > MOST_VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {MOST_KEYS} and {MOST_VALUES}"
    return None


TRITON = own_kernels("hybridtron.ops.delta.kernels:delta_scan", _unsupported_reason)
