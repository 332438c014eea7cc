"""The delta rule with a decay per head (Gated DeltaNet) or per key channel (KDA), and the gates that it reads."""

from hybridtron.ops.delta import chunked, gates, native, reference, triton
from hybridtron.ops.delta.gates import DeltaGateInputs
from hybridtron.ops.delta.reference import DeltaInputs
from hybridtron.ops.dispatch import Op

__all__ = ["DeltaGateInputs", "DeltaInputs", "delta_gates", "delta_scan"]

delta_scan = Op(reference.delta_scan, (triton.TRITON, native.NATIVE, chunked.CHUNKED))
delta_gates = Op(gates.delta_gates, (triton.GATES,))
