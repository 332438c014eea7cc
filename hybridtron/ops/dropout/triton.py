"""Dropout by this project's Triton kernel (`kernels`), which was checked on an H200 (benchmarks/gpu.md)."""

from hybridtron.ops.kernel_launch import own_kernels

TRITON = own_kernels("hybridtron.ops.dropout.kernels:dropout")
