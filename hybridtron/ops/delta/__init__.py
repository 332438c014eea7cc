"""The delta rule with one decay per head (Gated DeltaNet) or per key channel (KDA)."""

from hybridtron.ops.delta import chunked, native, reference, triton
from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.dispatch import Op

__all__ = ["DeltaInputs", "delta_scan"]

delta_scan = Op(reference.delta_scan, (triton.TRITON, native.NATIVE, chunked.CHUNKED))
