"""Mamba-1's selective scan: the op `selective_scan` and its implementations, in the order of preference."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.scan import chunked, mamba_ssm, native, reference, triton
from hybridtron.ops.scan.reference import ScanInputs, step_sizes

__all__ = ["ScanInputs", "selective_scan", "step_sizes"]

selective_scan = Op(
    reference.selective_scan,
    (mamba_ssm.MAMBA_SSM, triton.TRITON, native.NATIVE, chunked.CHUNKED),
)
