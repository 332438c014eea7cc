"""Dropout by a counter: a hash of a value's token number and channel number decides if the value is dropped.

    u = mix(token ^ channel)                        32 bits (the finish of MurmurHash3)
    y = x / (1 - share) where u >= share 2^32, else 0

No random state is read or kept: a pass that runs again draws the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# as int32
FIRST = 0x85EBCA6B - 2**32
SECOND = 0xC2B2AE35 - 2**32


class DropoutInputs(NamedTuple):
    """Values x (..., C), int32 numbers for its tokens (...) and channels (C,) from `numbers`, and the share to drop."""

    x: Tensor
    tokens: Tensor
    channels: Tensor
    share: float


def dropout(inputs: DropoutInputs) -> Tensor:
    """Return y, in the dtype of x."""
    x, tokens, channels, share = inputs
    bits = mixed(tokens[..., None] ^ channels)
    return torch.where(bits >= threshold(share), x * (1 / (1 - share)), 0.0)


def threshold(share: float) -> int:
    """Return the smallest hash, as int32, with which a value is kept; int32 counts from -2^31."""
    return int(share * 2**32) - 2**31


def mixed(bits: Tensor) -> Tensor:
    """Hash int32 to int32, evenly distributed over all of its range (the finish of MurmurHash3).

    This happens in place, because `bits` is as large as the values.
    """
    for shift, factor in ((16, FIRST), (13, SECOND)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(2**16 - 1))
