"""Gated linear attention by this project's Triton kernels (`kernels`), and its log decays (`kernels_gates`).

The scan takes the state before a row and returns the state after it. It supports several documents in a row. All
kernels are deterministic. The scan was compared with the reference in Triton's interpreter and on an H200
(benchmarks/gpu.md). The log decays were compared in the interpreter only.
"""

from __future__ import annotations

from hybridtron.ops.gla.gates import GLAGateInputs
from hybridtron.ops.gla.reference import GLAInputs
from hybridtron.ops.kernel_launch import own_kernels, refused_above

KEYS = 256  # maximum key channels per head
VALUES = 512  # maximum value channels per head
MOST_DECAYS = 8192  # maximum key channels of all heads: a program of `gla_gates` keeps all of them in registers


def _unsupported_reason(inputs: GLAInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > KEYS or values > VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {KEYS} and {VALUES}"
    return None


def _unsupported_decays(inputs: GLAGateInputs) -> str | None:
    channels = inputs.a_BLK.shape[2]
    return refused_above(MOST_DECAYS, channels, f"{channels} key channels")


TRITON = own_kernels("hybridtron.ops.gla.kernels:gla_scan", _unsupported_reason)
GATES = own_kernels("hybridtron.ops.gla.kernels_gates:gla_gates", _unsupported_decays)
