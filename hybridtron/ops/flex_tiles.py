"""FlexAttention over tiles of queries and keys: lists of the tiles that it reads, and the call, compiled to one kernel.

Legend: B rows, L queries, S keys, H query heads, G key/value heads, K head size; T tiles of queries, U tiles of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
SMALLEST_HEAD = 16


def flex_unsupported_reason(q_BLHK: Tensor) -> str | None:
    """Return the reason why FlexAttention cannot take these queries, or None."""
    if q_BLHK.dtype == torch.float64:
        return "has no float64"
    size = q_BLHK.shape[-1]
    if size < SMALLEST_HEAD:
        return f"takes heads of at least {SMALLEST_HEAD} channels, not {size}"
    return None


def mask_of_tiles(
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], lengths: tuple[int, int], *tiles_BHTU: Tensor
) -> BlockMask:
    """Build a block mask from boolean maps of tiles (B, H, T, U).

    The first map marks tiles in which `sees` decides for each query and key. An optional second map marks tiles that
    are read in full, without a call to `sees`.
    """
    lists = []
    for tiles in tiles_BHTU:
        first_to_last = tiles.int().argsort(dim=-1, descending=True, stable=True)
        lists += [tiles.sum(-1, dtype=torch.int32), first_to_last.int()]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=lengths)


def attend_to_tiles(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: BlockMask, window: int | None = None
) -> Tensor:
    """Attend to the tiles of a mask.

    The mask alone decides; `window` (None: no limit) only lets a simulation estimate the work. On a CPU FlexAttention
    has no backward pass, and tests run only its forward pass there.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    attend = _kernel(window) if q.is_cuda else flex_attention
    return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


@functools.cache
def _kernel(window: int | None) -> Callable[..., Tensor]:
    """Compile FlexAttention to one kernel; without compilation it would store all scores.

    `window` does not change the kernel. The simulation, which has no tiles, replaces this function by one that counts
    the work of a window.
    """
    return torch.compile(flex_attention, dynamic=True)
