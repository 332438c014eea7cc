"""fp32 matrix multiplications by oneDNN instead of MKL, on AMD's CPUs with AVX-512.

On these CPUs, MKL uses only AVX2, which has half the vector width: on one core of a Zen 5, MKL reaches 90 GFLOP/s, and
oneDNN reaches 200 GFLOP/s. On other CPUs both are equally fast, and this file is not used. Results are bit-identical
for any number of threads.

A sum with more than DEPTH terms, such as a weight's gradient over all tokens, is divided into partial sums, so that
rounding errors stay small. A last partial sum with few terms would take as long as one with many: they belong to the
partial sum before it.

Legend: T any leading axes, I input channels, O output channels. A matrix multiplication is (M, K) times (K, N); in
`_Linear`, M is the number of tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.dispatch import Implementation, untraced
from hybridtron.ops.product.reference import LinearInputs, ProductInputs

DEPTH = 512  # terms per partial sum
REST = 64  # with fewer terms than this left over, the last partial sum takes them too
LEAST = 2**22  # minimum number of multiplications; with fewer, the overhead of some 70 us per call is too large


@functools.cache
def missing() -> str | None:
    """Return the reason why oneDNN is not used on this machine; return None if it is used."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "this torch has no oneDNN"
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        about = ""
    if "AuthenticAMD" in about and "avx512f" in about:
        return None
    return "for AMD's CPUs with AVX-512; torch uses MKL on other CPUs"


def _unsupported_reason(inputs: LinearInputs | ProductInputs) -> str | None:
    left, right = inputs[:2]
    if torch.compiler.is_compiling():
        return "torch.compile chooses products itself"
    if left.dtype != torch.float32 or right.dtype != torch.float32:
        return "for fp32: torch itself uses oneDNN for bf16"
    if isinstance(inputs, LinearInputs):
        outside = len(right)
    else:
        outside = right.shape[1]
    if left.numel() * outside >= LEAST:
        return None
    return f"gains nothing on products with fewer than {LEAST:,} multiplications"


def matrix_product(inputs: ProductInputs) -> Tensor:
    """Return the matrix product `left @ right` in a new tensor, even if `room_MN` is given."""
    return _times(inputs.left_MK, inputs.right_KN.t())


@untraced
def linear(inputs: LinearInputs) -> Tensor:
    return _Linear.apply(*inputs)


LINEAR: Implementation[LinearInputs, Tensor] = Implementation(
    "onednn", linear, "cpu", unsupported_reason=_unsupported_reason, missing=missing
)
PRODUCT: Implementation[ProductInputs, Tensor] = Implementation(
    "onednn", matrix_product, "cpu", unsupported_reason=_unsupported_reason, missing=missing
)


class _Linear(torch.autograd.Function):
    """Autograd function for `linear`. It saves its inputs for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _times(_flat(x_TI), weight_OI).view(*x_TI.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        grad_MO = _flat(grads[0])
        if ctx.needs_input_grad[0]:
            of_x = _times(grad_MO, weight_OI.t()).view(x_TI.shape)
        else:
            of_x = None
        return of_x, _times(grad_MO.t(), _flat(x_TI).t()) if ctx.needs_input_grad[1] else None


def _times(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return left right^T, as a sum over partial products with DEPTH terms.

    torch copies a left factor that is transposed in memory. If such a factor has more rows than the right factor,
    right left^T is computed instead, and the result is transposed.
    """
    if left_MK.stride(1) != 1 and len(left_MK) > len(right_NK):
        return _times(right_NK, left_MK).t()
    total_MN: Tensor | None = None
    depths = partial_sums(left_MK.shape[1])
    for left, right in zip(left_MK.split(depths, 1), right_NK.split(depths, 1), strict=True):
        part_MN = torch.ops.mkldnn._linear_pointwise(_dense(left), _dense(right), None, "none", [], "")
        if total_MN is None:
            total_MN = part_MN
        else:
            total_MN = total_MN.add_(part_MN)
    assert total_MN is not None
    return total_MN


def partial_sums(terms: int) -> list[int]:
    """Return the number of terms of each partial sum."""
    whole, rest = divmod(terms, DEPTH)
    depths = [DEPTH] * whole
    if whole and rest < REST:
        depths[-1] += rest
    else:
        depths.append(rest)
    return depths


def _dense(x: Tensor) -> Tensor:
    """Return x as a contiguous or transposed contiguous matrix; x is copied if it is neither.

    A slice of a wider tensor is neither. With such slices, oneDNN can be a thousand times slower.
    """
    if x.t().is_contiguous():
        return x
    return x.contiguous()


def _flat(x: Tensor) -> Tensor:
    """Reshape x to (tokens, channels), contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()
