"""The scan of Mamba-2 (SSD)."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.ssd import chunked, mamba_ssm, native, reference, triton
from hybridtron.ops.ssd.reference import SSDInputs

__all__ = ["SSDInputs", "ssd_scan"]

ssd_scan = Op(reference.ssd_scan, (mamba_ssm.MAMBA_SSM, triton.TRITON, native.NATIVE, chunked.CHUNKED))
