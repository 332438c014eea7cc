"""GEGLU's gate by Triton kernels of our own (`kernels`). Correct on an H200 (benchmarks/gpu.md)."""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels

TRITON = own_kernels("hybridtron.ops.geglu.kernels:geglu", lambda _: left_to_torch_compile())
