"""Dropout without a random state: a hash of token and channel numbers decides which elements are dropped.

    u = mix(token ^ channel) + 2**31               from 0 to 2**32 - 1
    y = x / (1 - share) if u >= share * 2**32, else 0

`token` and `channel` are an element's token number and channel number (`numbers.py`). mix is MurmurHash3's finalizer,
with its result read as int32. `share` is the fraction of elements to drop. u depends only on the two numbers. So if a
forward pass is computed again, the same elements are dropped again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# multipliers of MurmurHash3's finalizer, as int32
FIRST = 0x85EBCA6B - 2**32
SECOND = 0xC2B2AE35 - 2**32


class DropoutInputs(NamedTuple):
    """Activations x (..., C), int32 numbers of tokens (...) and channels (C,), and the fraction to drop (`share`).

    `numbers.py` computes the numbers.
    """

    x: Tensor
    tokens: Tensor
    channels: Tensor
    share: float


def dropout(inputs: DropoutInputs) -> Tensor:
    """Return x with the dropped elements set to 0 and the remaining elements scaled by 1 / (1 - share)."""
    x, tokens, channels, share = inputs
    bits = mixed(tokens[..., None] ^ channels)
    return torch.where(bits >= threshold(share), x * (1 / (1 - share)), 0.0)


def threshold(share: float) -> int:
    """Return the smallest hash (result of `mixed`) for which an element is kept: share * 2**32 - 2**31."""
    return int(share * 2**32) - 2**31


def mixed(bits: Tensor) -> Tensor:
    """Hash int32 to int32 with MurmurHash3's finalizer; hashes are evenly distributed over the full range.

    `bits` has as many elements as x. To save memory, the result overwrites it.
    """
    for shift, factor in ((16, FIRST), (13, SECOND)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(factor)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(2**16 - 1))
