"""FlexAttention over tiles of queries and keys: the list of tiles that it reads, and its call as one kernel.

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
    """Why FlexAttention can't take such queries; None where it can."""
    if q_BLHK.dtype == torch.float64:
        return "has no float64"
    size = q_BLHK.shape[-1]
    return f"takes heads of at least {SMALLEST_HEAD} channels, not {size}" if size < SMALLEST_HEAD else None


def mask_of_tiles(
    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], lengths: tuple[int, int], *tiles_BHTU: Tensor
) -> BlockMask:
    """Of the tiles in which `sees` decides, and, where there are second ones, of those that are read without asking."""
    lists = []
    for tiles in tiles_BHTU:
        first_to_last = tiles.int().argsort(dim=-1, descending=True, stable=True)
        lists += [tiles.sum(-1, dtype=torch.int32), first_to_last.int()]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=lengths)


def attend_to_tiles(
    q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask: BlockMask, window: int | None = None
) -> Tensor:
    """Of the mask; a query sees at most `window` keys, or all before it, which says how much work this is.

    FlexAttention has no backward on a CPU; there its forward is tested.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BSGK, v_BSGK))
    attend = _kernel(window) if q.is_cuda else flex_attention
    return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


@functools.cache
def _kernel(window: int | None) -> Callable[..., Tensor]:
    """Compiled to one kernel; uncompiled it would make all scores.

    The same for every window: a rehearsal, which knows no tiles, counts by it.
    """
    return torch.compile(flex_attention, dynamic=True)
