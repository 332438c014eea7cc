"""Numbers that identify tokens and channels in the draws of dropout: hashes of a seed and of a place.

A token's place is its row, its index in the row and its position in its document; a channel's is its index among the
channels of all ranks. So every rank that has a token and a channel draws the same, however rows and channels are
sharded.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 0x2545F4914F6CDD1D
PLACE = 0x1F83D9ABFB41BD6B
POSITION = 0x3C6EF372FE94F82B
CHANNEL = 0x5851F42D4C957F2D
"""Odd multipliers of up to 63 bits, which spread counts over all bits."""


def token_numbers(seed: int, positions_BL: Tensor, first: int) -> Tensor:
    """Return a number for every token, int32 (B, L); `first` is the index in the rows at which these tokens begin."""
    rows, length = positions_BL.shape
    rows_B1 = torch.arange(rows, device=positions_BL.device)[:, None]
    places_L = torch.arange(first, first + length, device=positions_BL.device)
    return _mixed(rows_B1 * ROW + places_L * PLACE + positions_BL * POSITION + _signed(seed))


def channel_numbers(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a number for each of `count` channels from index `first` on, int32 (C,)."""
    return _mixed(torch.arange(first, first + count, device=device) * CHANNEL + _signed(~seed & (2**64 - 1)))


def _signed(seed: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit number."""
    if seed >= 2**63:
        return seed - 2**64
    return seed


def _mixed(x: Tensor) -> Tensor:
    """Hash int64 to int32, so that each bit depends on all 64 (the finish of SplitMix64); products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).int()
