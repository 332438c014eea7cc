"""The delta rule by this project's Triton kernels (`kernels`), and its step sizes and decays (`kernels_gates`).

The scan takes the state before a row and returns the state after it. It supports several documents in a row. All
kernels are deterministic. The scan was compared with the reference in Triton's interpreter and on an H200
(benchmarks/gpu.md). The step sizes and decays were compared in the interpreter only.
"""

from __future__ import annotations

from hybridtron.ops.delta.gates import DeltaGateInputs
from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.kernel_launch import own_kernels, refused_above

MOST_KEYS = 128  # maximum key channels per head: one program of `walk` keeps all of them in registers
MOST_VALUES = 256  # maximum value channels per head
MOST_DECAYS = 4096  # maximum decays per token: a program of `delta_gates` keeps all of them in registers


def _unsupported_reason(inputs: DeltaInputs) -> str | None:
    keys = inputs.k_BLHN.shape[3]
    values = inputs.v_BLHP.shape[3]
    if keys > MOST_KEYS or values > MOST_VALUES:
        return f"heads of {keys} keys and {values} values; the kernels take {MOST_KEYS} and {MOST_VALUES}"
    return None


def _unsupported_decays(inputs: DeltaGateInputs) -> str | None:
    decays = inputs.a_BLX.shape[2]
    return refused_above(MOST_DECAYS, decays, f"{decays} decays per token")


TRITON = own_kernels("hybridtron.ops.delta.kernels:delta_scan", _unsupported_reason)
GATES = own_kernels("hybridtron.ops.delta.kernels_gates:delta_gates", _unsupported_decays)
