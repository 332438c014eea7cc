"""Numbers that stand for tokens and for channels in the draws of dropout: a hash of a seed and of where these are.

A token is its row, its place there and its position in its document; a channel is its index among those of all ranks.
So every rank that has a token and a channel draws the same, however rows and channels are cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW, PLACE, POSITION, CHANNEL = 0x2545F4914F6CDD1D, 0x1F83D9ABFB41BD6B, 0x3C6EF372FE94F82B, 0x5851F42D4C957F2D
"""Odd numbers of 63 bits, by which what is counted is spread over all bits."""


def token_numbers(seed: int, positions_BL: Tensor, first: int) -> Tensor:
    """Of every token, int32 (B, L); `first` is the place in the rows at which these tokens begin."""
    rows, length = positions_BL.shape
    rows_B1 = torch.arange(rows, device=positions_BL.device)[:, None]
    places_L = torch.arange(first, first + length, device=positions_BL.device)
    return _mixed(rows_B1 * ROW + places_L * PLACE + positions_BL * POSITION + _signed(seed))


def channel_numbers(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Of this many channels from the first one on, int32."""
    return _mixed(torch.arange(first, first + count, device=device) * CHANNEL + _signed(~seed & (2**64 - 1)))


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def _mixed(x: Tensor) -> Tensor:
    """32 bits of 64, each a function of all (the finish of SplitMix64); products keep their lowest 64 bits."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    x = (x ^ (x >> 31)) & 0xFFFFFFFF
    return torch.where(x >= 2**31, x - 2**32, x).int()
