"""The elementwise part of SwiGLU by this project's Triton kernels, checked on an H200 (benchmarks/gpu.md)."""

from __future__ import annotations

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.kernel_launch import own_kernels

TRITON = own_kernels("hybridtron.ops.swiglu.kernels:swiglu", lambda _: left_to_torch_compile())
