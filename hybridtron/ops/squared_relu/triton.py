"""Squared ReLU by this project's Triton kernels, which have run in Triton's interpreter only."""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels

TRITON = own_kernels("hybridtron.ops.squared_relu.kernels:squared_relu", lambda _: left_to_torch_compile())
