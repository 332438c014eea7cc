"""Rotations of keys and queries by data-dependent angles, for Mamba-3."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.rotations import blocked, native, reference, triton
from hybridtron.ops.rotations.reference import AngleInputs, TurnInputs, turned

__all__ = ["AngleInputs", "TurnInputs", "angles", "turn_pairs", "turned"]

angles = Op(reference.angles, (triton.ANGLES, native.NATIVE_ANGLES, blocked.BLOCKED))
turn_pairs = Op(reference.turn_pairs, (triton.TURNS, native.NATIVE_TURNS))
