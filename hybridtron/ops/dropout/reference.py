"""Dropout by a counter: whether a value is dropped is a function of its token's and its channel's number.

    u = mix(token ^ channel)                        32 bits (the finish of MurmurHash3)
    y = x / (1 - share) where u >= share 2^32, else 0

No random state is read or kept: a pass that runs again draws the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FIRST, SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32  # as int32


class DropoutInputs(NamedTuple):
    """x (..., C), and int32 numbers of its tokens (...) and channels (C,), see `numbers`; the share that is dropped."""

    x: Tensor
    tokens: Tensor
    channels: Tensor
    share: float


def dropout(inputs: DropoutInputs) -> Tensor:
    """y, in the dtype of x."""
    x, tokens, channels, share = inputs
    bits = mixed(tokens[..., None] ^ channels)
    return torch.where(bits >= threshold(share), x * (1 / (1 - share)), 0.0)


def threshold(share: float) -> int:
    """The least number that is kept, as an int32 counts from -2^31."""
    return int(share * 2**32) - 2**31


def mixed(bits: Tensor) -> Tensor:
    """In place, as there are as many of them as there are values; from -2^31 on, evenly."""
    for shift, factor in ((16, FIRST), (13, SECOND)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(2**16 - 1))
