"""A Triton kernel that adds up the partial sums of another kernel's programs, and casts the result.

    y[k, n] = sum over s of x[k, s, n]

torch would launch one kernel for the sum and one for the cast. The order of the additions depends on the shape alone,
so results are deterministic. The kernel has run in Triton's interpreter only.

Legend: K kinds of sums, S parts of each sum, N entries of each part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div, launch

PARTS = 64  # parts that a program loads at a time
BLOCK = 32  # entries per program
WARPS = 8


def sum_of_parts(parts_KSN: Tensor, dtype: torch.dtype, precise: bool = False) -> Tensor:
    """Return the sums (K, N) in `dtype`. They are accumulated in fp32, or in float64 if `precise`.

    The parts must be contiguous and in fp32. If `precise`, the parts may also be in float64, and `dtype` must be fp32
    or float64.
    """
    kinds, parts, size = parts_KSN.shape
    sums_KN = parts_KSN.new_empty(kinds, size, dtype=dtype)
    launch(_sum_of_parts, (ceil_div(size, BLOCK), kinds), parts_KSN, sums_KN, parts, size, precise, PARTS, BLOCK,
           warps=WARPS)  # fmt: skip
    return sums_KN


@triton.jit
def _sum_of_parts(
    parts_ptr: tl.tensor, sums_ptr: tl.tensor, parts: int, size: int, PRECISE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sums for one kind and BLOCK entries. Grid: (blocks of entries, kinds)."""
    kind = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((PARTS, BLOCK), tl.float64 if PRECISE else tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        place = (kind * parts + part)[:, None] * size + n[None, :]
        sums += tl.load(parts_ptr + place, (part < parts)[:, None] & (n < size)[None, :], 0.0)
    tl.store(sums_ptr + kind * size + n, tl.sum(sums, 0), n < size)
