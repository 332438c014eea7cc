"""Numbers for tokens and channels; dropout hashes an element's two numbers to decide whether to drop the element.

A token's number is a hash of a seed, the token's row (sequence in the batch), its index in the row, and its position in
its document. A channel's number is a hash of the seed and the channel's index in the full, undivided layer. Therefore
the dropped elements do not depend on how ranks divide tokens and channels.

Legend: B rows, L tokens per row, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

# odd multipliers that spread small integers over 64 bits
ROW = 0x2545F4914F6CDD1D  # for a token's row
PLACE = 0x1F83D9ABFB41BD6B  # for a token's index in its row
POSITION = 0x3C6EF372FE94F82B  # for a token's position in its document
CHANNEL = 0x5851F42D4C957F2D  # for a channel's index


def token_numbers(seed: int, positions_BL: Tensor, first: int) -> Tensor:
    """Return the tokens' numbers, int32 (B, L). `first` is the first token's index in the row, 0 for complete rows."""
    rows, length = positions_BL.shape
    rows_B1 = torch.arange(rows, device=positions_BL.device)[:, None]
    places_L = torch.arange(first, first + length, device=positions_BL.device)
    return _mixed(rows_B1 * ROW + places_L * PLACE + positions_BL * POSITION + _signed(seed))


def channel_numbers(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the numbers for the `count` channels from index `first` on, int32 (C,)."""
    return _mixed(torch.arange(first, first + count, device=device) * CHANNEL + _signed(~seed & (2**64 - 1)))


def _signed(seed: int) -> int:
    """Convert an unsigned 64-bit number to the int64 with the same bits."""
    if seed >= 2**63:
        return seed - 2**64
    return seed


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 to int32 with SplitMix64's finalizer. The multiplications overflow on purpose."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).int()
