"""Mamba-2's scan (SSD) as the op `ssd_scan`, and its recurrence with given decays as the op `decay_scan`."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.ssd import chunked, mamba_ssm, native, reference, triton
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs

__all__ = ["DecayInputs", "SSDInputs", "decay_scan", "ssd_scan"]

ssd_scan = Op(reference.ssd_scan, (mamba_ssm.MAMBA_SSM, triton.TRITON, native.NATIVE, chunked.CHUNKED))
decay_scan = Op(reference.decay_scan, (triton.TRITON_DECAY, native.NATIVE_DECAY, chunked.CHUNKED_DECAY))
