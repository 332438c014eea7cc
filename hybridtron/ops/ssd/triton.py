"""The scan of Mamba-2, and its recurrence, by our own Triton kernels (`kernels`).

They take and return states, know document boundaries, and are deterministic. For the scan the mamba-ssm package comes
first; these kernels run if the package is missing, or if `run.deterministic` is set and its version can't repeat its
bits. Checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import ceil_div, own_kernels
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs

# maximum channels and state entries per head that fit beside a chunk's tokens
MAX_HEAD = 128
MAX_STATE = 256


def _unsupported_reason(inputs: SSDInputs) -> str | None:
    return _too_large(inputs.x_BLHP.shape[3], inputs.B_BLGN.shape[3])


def _unsupported_decay_reason(inputs: DecayInputs) -> str | None:
    head = inputs.v_BLHP.shape[3]
    slices = ceil_div(head, MAX_HEAD)
    if head % slices:
        return f"heads of {head} values, which are not cut into {slices} equal slices of at most {MAX_HEAD}"
    return _too_large(head // slices, inputs.k_BLGN.shape[3])


def _too_large(head: int, state: int) -> str | None:
    if head > MAX_HEAD or state > MAX_STATE:
        return f"heads of {head} channels and {state} state entries; the kernels take {MAX_HEAD} and {MAX_STATE}"
    return None


TRITON = own_kernels("hybridtron.ops.ssd.kernels:ssd_scan", _unsupported_reason)
TRITON_DECAY = own_kernels("hybridtron.ops.ssd.kernels:decay_scan", _unsupported_decay_reason)
