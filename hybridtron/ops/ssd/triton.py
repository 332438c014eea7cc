"""Mamba-2's scan (`ssd_scan`) and its recurrence with given decays (`decay_scan`) by this project's Triton kernels.

The kernels support initial and final states and document boundaries, and are deterministic. For `ssd_scan`, dispatch
prefers the mamba-ssm package. This project's kernels run if the package is missing, or if `run.deterministic` is set
and the installed version of the package is not deterministic. An earlier version of the kernels was checked on an H200
(benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import ceil_div, own_kernels
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs

# with larger heads or states, the tiles of a chunk would not fit in a multiprocessor's registers and shared memory
MAX_HEAD = 128  # maximum channels per head (P)
MAX_STATE = 256  # maximum state size (N)


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    return _too_large(inputs.x_BLHP.shape[3], inputs.B_BLGN.shape[3])


def _unsupported_decay_reason(inputs: DecayInputs) -> str | None:
    head = inputs.v_BLHP.shape[3]
    slices = ceil_div(head, MAX_HEAD)
    if head % slices:
        return f"heads of {head} channels, which can't be divided into {slices} equal heads of at most {MAX_HEAD}"
    return _too_large(head // slices, inputs.k_BLGN.shape[3])


def _too_large(head: int, state: int) -> str | None:
    if head > MAX_HEAD or state > MAX_STATE:
        return f"heads of {head} channels, {state} state entries; the kernels support at most {MAX_HEAD}, {MAX_STATE}"
    return None


TRITON = own_kernels("hybridtron.ops.ssd.kernels:ssd_scan", _unsupported_reason)
TRITON_DECAY = own_kernels("hybridtron.ops.ssd.kernels:decay_scan", _unsupported_decay_reason)
