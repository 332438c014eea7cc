"""Sparse attention by this project's Triton kernels (`kernels`), for at most two rules that select keys.

The kernels support document boundaries and remembered keys. They were compared with the reference in Triton's
interpreter, and were compiled for sm_90 and checked on an H200 (benchmarks/gpu.md).
"""

from __future__ import annotations

import torch

from hybridtron.ops.kernel_launch import own_kernels
from hybridtron.ops.sparse.reference import Budget, SparseInputs

SIZE = 128  # maximum channels per key
FP32_SIZE = 32  # maximum channels per key if any input is fp32
BEST = 128  # maximum number of keys that the rule `best` selects


def _unsupported_reason(inputs: SparseInputs) -> str | None:
    size = inputs.q_RLN.shape[2]
    budget = inputs.seen.budget
    rules = sum(bool(most) for most in budget[: Budget._fields.index("stride")])
    if size > SIZE:
        return f"keys of {size} channels; the kernels support at most {SIZE}"
    if size > FP32_SIZE and any(x.dtype == torch.float32 for x in inputs[:3]):
        return f"keys of {size} channels in fp32; the kernels support at most {FP32_SIZE}"
    if budget.best > BEST:
        return f"the {budget.best} keys with the best scores; the kernels support at most {BEST}"
    if rules > 2:
        return f"{rules} rules for visible keys; the kernels support at most two"
    return None


TRITON = own_kernels("hybridtron.ops.sparse.kernels:sparse_attention", _unsupported_reason)
