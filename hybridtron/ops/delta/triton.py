"""The delta rule by Triton kernels of our own (`kernels`): states in and out, documents, the same bits again.

Compared with the reference in Triton's interpreter, and compiled for sm_90; right on an H200
(benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_KEYS, MOST_VALUES = 128, 256  # of a head: a program carries all keys of a state, for some values


def _unsupported_reason(inputs: DeltaInputs) -> str | None:
    keys, values = inputs.k_BLHN.shape[3], inputs.v_BLHP.shape[3]
    if keys > MOST_KEYS or values > MOST_VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {MOST_KEYS} and {MOST_VALUES}"
    return None


TRITON = own_kernels("hybridtron.ops.delta.kernels:delta_scan", _unsupported_reason)
