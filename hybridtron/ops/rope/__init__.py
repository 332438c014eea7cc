"""Rotary position embedding (RoPE)."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.rope import native, reference, triton
from hybridtron.ops.rope.reference import RopeInputs, frequencies, rope_table

__all__ = ["RopeInputs", "apply_rope", "frequencies", "rope_table"]

apply_rope = Op(reference.apply_rope, (triton.TRITON, native.NATIVE))
