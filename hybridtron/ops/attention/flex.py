"""Attention as FlexAttention, for CUDA: windows, documents and remembered keys in one kernel, on visible tiles alone.

As documents count up along a row, a token sees one run of keys: from the first key that its window and its document
hold, to its own. Both ends only move forward along a row. So of the 128 x 128 tiles of queries and keys, those that any
query of a tile sees are a run too, from where its first query begins to where its last one ends; and those that all its
queries see in full, which need no mask, are the run from where its last query begins to where its first one ends.
No tensor of L x L ever exists, only lists of tiles, (B, L / 128, S / 128).

Some dozens of small operations make these lists: without documents and memory once for given sizes, with documents once
for each batch and window, and with remembered keys in every call.
FlexAttention has no backward pass on a CPU; tests there cover its forward pass and the tiles.
Correct on an H200 (benchmarks/gpu.md).

Legend as in `reference`; T tiles of queries, U tiles of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from hybridtron.ops.attention.reference import AttentionInputs, SeenKeys, joined, seen_keys
from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.flex_tiles import TILE, attend_to_tiles, flex_unsupported_reason, mask_of_tiles


def mask_of(seen: SeenKeys) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask function: True if a query, by its index in the row, sees a key of all S keys."""

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= seen.first_BL[b, query]) & (key <= seen.last_L[query])

    return sees


def block_mask(seen: SeenKeys, total: int) -> BlockMask:
    """Build the block mask: tiles seen in part, which need a mask, and tiles that all their queries see in full."""
    length = len(seen.last_L)
    device = seen.last_L.device
    begins_T = torch.arange(0, length, TILE, device=device)
    ends_T = (begins_T + TILE - 1).clamp(max=length - 1)
    tile_U = torch.arange(-(-total // TILE), device=device)
    some_BTU = (tile_U >= seen.first_BL[:, begins_T, None] // TILE) & (tile_U <= seen.last_L[ends_T, None] // TILE)
    whole_BTU = tile_U >= -(-seen.first_BL[:, ends_T, None] // TILE)
    whole_BTU &= tile_U < (seen.last_L[begins_T, None] + 1) // TILE
    masked_BHTU = (some_BTU & ~whole_BTU)[:, None]
    whole_BHTU = whole_BTU[:, None]
    return mask_of_tiles(mask_of(seen), (length, total), masked_BHTU, whole_BHTU)


@functools.lru_cache(maxsize=8)
def _mask_of_sizes(batch: int, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Build the block mask of rows without documents and memory."""
    queries = torch.empty(batch, length, 0, 0, device=device)
    return block_mask(seen_keys(AttentionInputs(queries, queries, queries, window)), length)


_of_batches: MutableMapping[Tensor, dict[int | None, BlockMask]] = WeakIdKeyDictionary()
"""Block masks by the documents of a batch, for as long as that tensor lives, and by window."""


def _mask_of_batch(inputs: AttentionInputs, documents_BL: Tensor) -> BlockMask:
    """Return the block mask of a batch with documents and without memory; build it at the first call."""
    by_window = _of_batches.setdefault(documents_BL, {})
    if inputs.window not in by_window:
        by_window[inputs.window] = block_mask(seen_keys(inputs), inputs.q_BLHK.shape[1])
    return by_window[inputs.window]


def _unsupported_reason(inputs: AttentionInputs) -> str | None:
    if (reason := flex_unsupported_reason(inputs.q_BLHK)) is not None:
        return reason
    short = inputs.q_BLHK.shape[1] < TILE
    if short:
        return f"gains nothing on rows of fewer than {TILE} tokens, as in generation"
    return None


def attention(inputs: AttentionInputs) -> Tensor:
    """Attend to all rows in one call of FlexAttention."""
    q_BLHK, k_BLGK, v_BLGK, window, documents_BL, memory, _ = inputs
    k_BSGK, v_BSGK = joined(memory, k_BLGK, v_BLGK)
    if memory is not None or (documents_BL is not None and torch.compiler.is_compiling()):
        mask = block_mask(seen_keys(inputs), k_BSGK.shape[1])
    elif documents_BL is not None:
        mask = _mask_of_batch(inputs, documents_BL)
    else:
        mask = _mask_of_sizes(*q_BLHK.shape[:2], window, q_BLHK.device)
    return attend_to_tiles(q_BLHK, k_BSGK, v_BSGK, mask, window)


FLEX = Implementation("flex", attention, "cuda", unsupported_reason=_unsupported_reason)
