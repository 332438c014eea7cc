"""The softmax of the language-model loss by this project's Triton kernels (`kernels`).

The kernels were checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

from hybridtron.ops.kernel_launch import own_kernels

SUMS = own_kernels("hybridtron.ops.softmax.kernels:softmax_sums")
GRADIENTS = own_kernels("hybridtron.ops.softmax.kernels:softmax_gradients")
