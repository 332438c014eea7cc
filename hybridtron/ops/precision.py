"""The dtypes that ops compute in: at least fp32, and float64 for float64 inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """Return the dtype for states and reductions: float64 for float64 inputs, else fp32."""
    if x.dtype == torch.float64:
        return torch.float64
    return torch.float32


def state_or_zeros(state: Tensor | None, tokens: Tensor, *sizes: int) -> Tensor:
    """Return the initial state in the dtype `wide_type(tokens)`; if the state is None, return zeros (B, *sizes).

    `tokens` is an input (B, ...) of the op.
    """
    wide = wide_type(tokens)
    if state is None:
        return tokens.new_zeros(tokens.shape[0], *sizes, dtype=wide)
    return state.to(wide)


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert a tensor to fp32; return a float64 tensor unchanged."""
    if x.dtype == torch.float64:
        return x
    return x.float()


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the narrower of two dtypes: `first` if `second` can represent all values of `first`, else `second`.

    Neither fp16 nor bf16 can represent all values of the other; for these two dtypes, the result is `second`.
    """
    if torch.promote_types(first, second) == second:
        return first
    return second
