"""The scan of Mamba-2 (SSD), and its recurrence as an op of its own."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.ssd import chunked, mamba_ssm, native, reference, triton
from hybridtron.ops.ssd.reference import DecayInputs, SSDInputs

__all__ = ["DecayInputs", "SSDInputs", "decay_scan", "ssd_scan"]

ssd_scan = Op(reference.ssd_scan, (mamba_ssm.MAMBA_SSM, triton.TRITON, native.NATIVE, chunked.CHUNKED))
decay_scan = Op(reference.decay_scan, (triton.TRITON_DECAY, native.NATIVE_DECAY, chunked.CHUNKED_DECAY))
