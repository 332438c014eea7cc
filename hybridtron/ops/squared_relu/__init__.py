"""Squared ReLU: relu(x)^2."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.squared_relu import reference, triton
from hybridtron.ops.squared_relu.reference import SquaredReLUInputs

__all__ = ["SquaredReLUInputs", "squared_relu"]

squared_relu = Op(reference.squared_relu, (triton.TRITON,))
