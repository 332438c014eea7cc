"""Numbers for tokens and channels; dropout hashes an element's two numbers to decide whether to drop the element.

A token's number is a hash of a seed, the token's row (sequence in the batch), its index in the row, and its position in
its document. A channel's number is a hash of the seed and the channel's index in the full, undivided layer. Therefore
the dropped elements do not depend on how ranks divide tokens and channels.

Legend: B rows, L tokens per row, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# odd multipliers that spread small integers over 64 bits
ROW = 0x2545F4914F6CDD1D  # for a token's row
PLACE = 0x1F83D9ABFB41BD6B  # for a token's index in its row
POSITION = 0x3C6EF372FE94F82B  # for a token's position in its document
CHANNEL = 0x5851F42D4C957F2D  # for a channel's index


def token_numbers(seed: int | Tensor, positions_BL: Tensor, first: int) -> Tensor:
    """Return the tokens' numbers, int32 (B, L). `first` is the first token's index in the row, 0 for complete rows.

    The seed is an unsigned 64-bit number, or an int64 tensor with its bits.
    """
    rows, length = positions_BL.shape
    rows_B1 = torch.arange(rows, device=positions_BL.device)[:, None]
    places_L = torch.arange(first, first + length, device=positions_BL.device)
    return _mixed(rows_B1 * ROW + places_L * PLACE + positions_BL * POSITION + _signed(seed))


def channel_numbers(seed: int | Tensor, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the numbers for the `count` channels from index `first` on, int32 (C,).

    The seed is an unsigned 64-bit number, or an int64 tensor with its bits.
    """
    return _mixed(torch.arange(first, first + count, device=device) * CHANNEL + ~_signed(seed))


def _signed(seed: Any) -> Any:
    """Convert an unsigned 64-bit number to the int64 with the same bits. A tensor is returned as it is."""
    if isinstance(seed, Tensor):
        return seed
    if seed >= 2**63:
        return seed - 2**64
    return seed


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 to int32 with SplitMix64's finalizer. The multiplications overflow on purpose."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).int()
