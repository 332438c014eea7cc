"""Gated linear attention by Triton kernels of our own (`kernels`).

They take and return states, keep documents apart and give reproducible bits. Compared with the reference in Triton's
interpreter, compiled for sm_90, and correct on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.gla.reference import GLAInputs
from hybridtron.ops.kernel_launch import own_kernels

# of a head, at most
KEYS = 256
VALUES = 512


def _unsupported_reason(inputs: GLAInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > KEYS or values > VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {KEYS} and {VALUES}"
    return None


TRITON = own_kernels("hybridtron.ops.gla.kernels:gla_scan", _unsupported_reason)
