"""Dropout by a Triton kernel of our own (`kernels`). Unmeasured on a GPU."""

from hybridtron.ops.kernel_launch import own_kernels

TRITON = own_kernels("hybridtron.ops.dropout.kernels:dropout")
