"""Gated linear attention (GLA): a recurrence with one decay per key channel, and the op for its log decays."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.gla import chunked, gates, native, reference, triton
from hybridtron.ops.gla.gates import GLAGateInputs
from hybridtron.ops.gla.reference import GLAInputs

__all__ = ["GLAGateInputs", "GLAInputs", "gla_gates", "gla_scan"]

gla_scan = Op(reference.gla_scan, (triton.TRITON, native.NATIVE, chunked.CHUNKED))
gla_gates = Op(gates.gla_gates, (triton.GATES,))
