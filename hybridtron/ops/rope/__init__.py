"""Rotary positions."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.rope import native, reference, triton
from hybridtron.ops.rope.reference import RopeInputs, rope_table

__all__ = ["RopeInputs", "apply_rope", "rope_table"]

apply_rope = Op(reference.apply_rope, (triton.TRITON, native.NATIVE))
