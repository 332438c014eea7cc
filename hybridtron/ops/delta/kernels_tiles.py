"""Tile sizes and warps for the delta rule's Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridtron.ops.gla.kernels_row import ChunkTiles

# Names of constants that most kernels take. For keys and values: the number of channels (N, P), the padded number
# (BLOCK_N, BLOCK_P), and the number per slice (KEYS, VALUES). For matrix multiplications: dtype and precision.
SIZES = "N", "P", "BLOCK_N", "BLOCK_P", "KEYS", "VALUES", "PRODUCT", "PRECISION"
NARROW = {"num_warps": 2}  # for the kernel `inverse`, which mostly sums across threads
WIDE = {"num_warps": 8}  # for kernels that need more registers than 4 warps have


@dataclass(frozen=True, kw_only=True)
class DeltaTiles(ChunkTiles):
    """Tile sizes for the delta rule's kernels: the fields of `ChunkTiles`, and two more.

    part (in `ChunkTiles`): tokens in a diagonal block; `kernels_forward.inverse` inverts these blocks, then merges them
    walk: value channels of the state that one program of `walk` or `walk_back` carries from chunk to chunk
    decayed_keys: key channels that a kernel of `kernels_pairs` loads at a time, for a decay per key channel
    """

    walk: int
    decayed_keys: int


def tiles(dtype: torch.dtype) -> DeltaTiles:
    """Return tile sizes for which ptxas spills almost no registers on an H100.

    fp32 matrix multiplications run without tensor cores, and need more registers. In bf16, `walk` must be 64: with 16
    or 32, Triton 3.6 and 3.7.1 compiled the kernel `walk` wrongly. On an H200 its states were then zero, or it accessed
    illegal addresses.
    """
    if dtype == torch.bfloat16:
        return DeltaTiles(64, 16, keys=64, values=64, walk=64, decayed_keys=32)
    walk = 8 if dtype == torch.float32 else 16
    return DeltaTiles(32, 16, keys=32, values=32, walk=walk, decayed_keys=16, warps=8)
