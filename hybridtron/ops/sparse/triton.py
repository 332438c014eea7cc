"""Sparse attention by our own Triton kernels (`kernels`), for one or two rules, with documents and remembered keys.

Compared with the reference in Triton's interpreter, compiled for sm_90, and checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

import torch

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.sparse.reference import Budget, SparseInputs

# maximum channels per key, the same in fp32, and maximum keys by score
SIZE = 128
FP32_SIZE = 32
BEST = 128


def _unsupported_reason(inputs: SparseInputs) -> str | None:
    size = inputs.q_RLN.shape[2]
    budget = inputs.seen.budget
    rules = sum(bool(most) for most in budget[: Budget._fields.index("stride")])
    if size > SIZE:
        return f"keys of {size} channels; the kernels take {SIZE}"
    if size > FP32_SIZE and any(x.dtype == torch.float32 for x in inputs[:3]):
        return f"keys of {size} channels in fp32; the kernels take {FP32_SIZE}"
    if budget.best > BEST:
        return f"{budget.best} keys by their scores; the kernels take {BEST}"
    if rules > 2:
        return f"{rules} rules; the kernels take two"
    return None


TRITON = own_kernels("hybridtron.ops.sparse.kernels:sparse_attention", _unsupported_reason)
