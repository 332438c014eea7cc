"""In what sizes the Triton kernels of the delta rule are cut, and by how many warps they run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtron.ops.gla.kernels_row import ChunkTiles

SIZES = "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES", "PRODUCT", "PRECISION"
NARROW = {"num_warps": 2}  # for one that computes little beside what it sums over threads
WIDE = {"num_warps": 8}  # for kernels that hold more than four warps have registers for


@dataclass(frozen=True, kw_only=True)
class DeltaTiles(ChunkTiles):
    """A chunk's parts are the blocks that are inverted at first.

    `walk` is the values that a program carries from chunk to chunk, with all keys of the head; `decayed_keys` those of
    pairs where every channel has a decay.
    """

    walk: int
    decayed_keys: int


def tiles(dtype: torch.dtype) -> DeltaTiles:
    """Chosen so that ptxas spills next to no registers for an H100; fp32 has products without tensor cores, which hold
    more.

    With 16 or 32 values in bf16 the walk went wrong on an H200, by what Triton 3.6 and 3.7.1 made of it: states of
    zeros, illegal addresses. With 64 it is right.
    """
    if dtype == torch.bfloat16:
        return DeltaTiles(64, 16, keys=64, values=64, walk=64, decayed_keys=32)
    walk = 8 if dtype == torch.float32 else 16
    return DeltaTiles(32, 16, keys=32, values=32, walk=walk, decayed_keys=16, warps=8)
