"""The dtypes that ops compute in: fp32 at least, and float64 for float64."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """What states and sums are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def state_before(state: Tensor | None, tokens: Tensor, *sizes: int) -> Tensor:
    """The state before rows of tokens (B, ...) in the type to compute in; zeros (B, *sizes) where there is none."""
    wide = wide_type(tokens)
    return tokens.new_zeros(tokens.shape[0], *sizes, dtype=wide) if state is None else state.to(wide)


def at_least_fp32(x: Tensor) -> Tensor:
    """The tensor in fp32, or unchanged where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one of two dtypes whose values the other can hold."""
    return first if torch.promote_types(first, second) == second else second
