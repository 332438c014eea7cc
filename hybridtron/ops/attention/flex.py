"""Causal attention by FlexAttention on CUDA, with windows, documents and remembered keys; hidden tiles are skipped.

A query sees one range of keys: from the first key that is in its window and in its document, up to its own key. Along a
row, both ends of this range only move forward.

Queries and keys are divided into tiles with TILE tokens. A query tile needs the key tiles from its first query's first
key to its last query's last key. A key tile that lies between the last query's first key and the first query's last key
is seen in full by every query of the query tile. It needs no mask. Two boolean tensors (B, 1, T, U) describe the pairs
of a query tile and a key tile: the first marks pairs that need a mask, and the second marks pairs that are seen in
full. A mask with L x S entries is never built.

Building the two tensors takes a few dozen small operations. The tensors are built

    in every call                                   with remembered keys, or with documents in torch.compile
    once for each batch and window                  with documents, and without remembered keys
    once for each batch size, length and window     in all other cases

Documents change the values of the two tensors, never their sizes. In training, a kernel is compiled for each number of
rows, length and number of heads, once for all documents and windows. Without gradients, and for full attention with
remembered keys, a kernel takes any length. Neither the tensors nor the kernel make the host wait for the device.

FlexAttention has no backward pass on a CPU, so tests on a CPU cover the forward pass and the two tensors. The backward
pass was checked on an H200 (benchmarks/gpu.md), with kernels for any sizes; no GPU has run a kernel for fixed sizes.

Legend: B rows (sequences in the batch), L tokens per row, S keys per row (remembered tokens before the row, then its L
tokens), H query heads, G key/value heads, K channels per head, T query tiles, U key tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakIdKeyDictionary

from hybridtron.ops.attention.reference import AttentionInputs, SeenKeys, joined, seen_keys
from hybridtron.ops.flex_tiles import TILE, attend_to_tiles, mask_of_tiles


def mask_of(seen: SeenKeys) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return FlexAttention's mask function; the mask function returns True if a query sees a key.

    The mask function's arguments are the indices for row, head, query (among L tokens) and key (among S keys).
    """

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= seen.first_BL[b, query]) & (key <= seen.last_L[query])

    return sees


def block_mask(seen: SeenKeys, total: int) -> BlockMask:
    """Build FlexAttention's block mask over `total` keys (S).

    `masked_BHTU` marks pairs of tiles that need the mask function. `whole_BHTU` marks pairs in which each query sees
    each key.
    """
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
    """Build the block mask for a batch that has neither documents nor remembered keys."""
    queries = torch.empty(batch, length, 0, 0, device=device)
    return block_mask(seen_keys(AttentionInputs(queries, queries, queries, window)), length)


def forget_masks() -> None:
    """Empty the cache of block masks by size.

    A CUDA graph must build the masks that it reads: the cache may free a mask that was built before. A mask that a
    graph has built is in the graph's memory, where no other call may read it.
    """
    _mask_of_sizes.cache_clear()


_of_batches: MutableMapping[Tensor, dict[int | None, BlockMask]] = WeakIdKeyDictionary()
"""Maps a batch's `documents_BL` to {window: block mask}. An entry is removed when its tensor is freed."""


def _mask_of_batch(inputs: AttentionInputs, documents_BL: Tensor) -> BlockMask:
    """Return the block mask for a batch with documents and without remembered keys, from a cache if possible."""
    by_window = _of_batches.setdefault(documents_BL, {})
    if inputs.window not in by_window:
        by_window[inputs.window] = block_mask(seen_keys(inputs), inputs.q_BLHK.shape[1])
    return by_window[inputs.window]


def attention(inputs: AttentionInputs) -> Tensor:
    """Return the attention output for all rows, from one call of FlexAttention."""
    q_BLHK, k_BLGK, v_BLGK, window, documents_BL, memory, _ = inputs
    k_BSGK, v_BSGK = joined(memory, k_BLGK, v_BLGK)
    if memory is not None or (documents_BL is not None and torch.compiler.is_compiling()):
        mask = block_mask(seen_keys(inputs), k_BSGK.shape[1])
    elif documents_BL is not None:
        mask = _mask_of_batch(inputs, documents_BL)
    else:
        mask = _mask_of_sizes(*q_BLHK.shape[:2], window, q_BLHK.device)
    return attend_to_tiles(q_BLHK, k_BSGK, v_BSGK, mask, window, _sizes_repeat(inputs))


def _sizes_repeat(inputs: AttentionInputs) -> bool:
    """Return True if a run has few different sizes: in training, without a memory that grows from chunk to chunk.

    Prompts and texts that are scored without gradients have any length.
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs[:3])
    return trains and (inputs.memory is None or inputs.window is not None)
