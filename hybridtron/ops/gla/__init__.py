"""Gated linear attention (GLA): a recurrence with one decay for each key channel."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.gla import chunked, native, reference, triton
from hybridtron.ops.gla.reference import GLAInputs

__all__ = ["GLAInputs", "gla_scan"]

gla_scan = Op(reference.gla_scan, (triton.TRITON, native.NATIVE, chunked.CHUNKED))
