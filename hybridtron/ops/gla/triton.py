"""Gated linear attention by this project's Triton kernels (`kernels`).

The kernels take the state before a row and return the state after it. They support several documents in a row, and are
deterministic. Results were compared with the reference in Triton's interpreter and on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.gla.reference import GLAInputs
from hybridtron.ops.kernel_launch import own_kernels

KEYS = 256  # maximum key channels per head
VALUES = 512  # maximum value channels per head


def _unsupported_reason(inputs: GLAInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > KEYS or values > VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {KEYS} and {VALUES}"
    return None


TRITON = own_kernels("hybridtron.ops.gla.kernels:gla_scan", _unsupported_reason)
