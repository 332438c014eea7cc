"""Attention as FlexAttention, for CUDA: windows, documents and remembered keys in one kernel, on the tiles that count.

As documents count up along a row, what a token sees is one run of keys: from the first key that its window and its
document hold, to its own. Both ends only go forward along a row. So of the 128 x 128 tiles of queries and keys, those
that any query of a tile sees are a run too, from where its first query begins to where its last one ends; and those
that all its queries see whole, which need no mask, are the run from where its last query begins to where its first one
ends. Nothing of L x L is ever made, only a list of tiles, (B, L / 128, S / 128).

Without documents and memory these lists are functions of sizes, made once; else in every call, by some eighty small
operations. FlexAttention has no backward on a CPU; there its forward is tested, and the tiles. Unmeasured on a GPU.

Legend as in `attention`; T tiles of queries, U tiles of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hybridtron.ops.attention.reference import AttentionInputs
from hybridtron.ops.dispatch import Implementation

TILE = 128
SMALLEST_HEAD = 16


class SeenKeys(NamedTuple):
    """Where among all keys the first is that a query sees, and the last, which is its own; both only grow along a row.

    Tensors, as a mask may capture no number that changes from call to call.
    """

    first_BL: Tensor
    last_L: Tensor


class SeenTiles(NamedTuple):
    """Runs of key tiles: what some query of a tile sees, and what all see whole, which may stop before it starts."""

    start_BT: Tensor
    stop_BT: Tensor
    whole_start_BT: Tensor
    whole_stop_BT: Tensor


def seen_keys(inputs: AttentionInputs) -> SeenKeys:
    """By the rules of the op."""
    q_BLHK, _, _, window, documents_BL, memory = inputs
    batch, length = q_BLHK.shape[:2]
    before = 0 if memory is None else memory.keys_BMGK.shape[1]
    last_L = torch.arange(before, before + length, device=q_BLHK.device)
    first_BL = torch.full((batch, length), before, device=q_BLHK.device)
    if documents_BL is not None:
        is_start_BL = F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0))
        first_BL = torch.where(is_start_BL, last_L, before).cummax(1).values
    if memory is not None:
        first_BL = torch.where(first_BL > before, first_BL, before - memory.length_B[:, None])
    if window is not None:
        first_BL = torch.maximum(first_BL, last_L - window + 1)
    return SeenKeys(first_BL, last_L)


def tiles_of(seen: SeenKeys) -> SeenTiles:
    """Of each tile of queries."""
    length = len(seen.last_L)
    begins_T = torch.arange(0, length, TILE, device=seen.last_L.device)
    ends_T = (begins_T + TILE - 1).clamp(max=length - 1)
    return SeenTiles(
        seen.first_BL[:, begins_T] // TILE,
        (seen.last_L[ends_T] // TILE + 1).expand(len(seen.first_BL), -1),
        -(-seen.first_BL[:, ends_T] // TILE),
        ((seen.last_L[begins_T] + 1) // TILE).expand(len(seen.first_BL), -1),
    )


def mask_of(seen: SeenKeys) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, by their numbers in the row and among all keys."""

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= seen.first_BL[b, query]) & (key <= seen.last_L[query])

    return sees


def block_mask(seen: SeenKeys, total: int) -> BlockMask:
    """The tiles as FlexAttention wants them listed: those with a mask first to last, and those without one."""
    tiles = SeenTiles(*(x[:, None] for x in tiles_of(seen)))
    whole_BT = (tiles.whole_stop_BT - tiles.whole_start_BT).clamp(min=0)
    head_BT = tiles.whole_start_BT - tiles.start_BT
    masked_BT = tiles.stop_BT - tiles.start_BT - whole_BT
    turn_U = torch.arange(-(-total // TILE), device=seen.last_L.device)
    skipped_BTU = torch.where(turn_U < head_BT[..., None], 0, whole_BT[..., None])
    masked_BTU = tiles.start_BT[..., None] + turn_U + skipped_BTU
    whole_BTU = tiles.whole_start_BT[..., None] + turn_U
    return BlockMask.from_kv_blocks(
        masked_BT.int(),
        masked_BTU.clamp(max=len(turn_U) - 1).int(),
        whole_BT.int(),
        whole_BTU.clamp(max=len(turn_U) - 1).int(),
        BLOCK_SIZE=TILE,
        mask_mod=mask_of(seen),
        seq_lengths=(len(seen.last_L), total),
    )


@functools.lru_cache(maxsize=8)
def _mask_of_sizes(batch: int, length: int, window: int | None, device: torch.device) -> BlockMask:
    """Without documents and memory."""
    queries = torch.empty(batch, length, 0, 0, device=device)
    return block_mask(seen_keys(AttentionInputs(queries, queries, queries, window)), length)


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    """FlexAttention as one kernel; uncompiled it would make all scores."""
    return torch.compile(flex_attention, dynamic=True)


def _unsupported_reason(inputs: AttentionInputs) -> str | None:
    _, length, _, size = inputs.q_BLHK.shape
    if inputs.q_BLHK.dtype == torch.float64:
        return "has no float64"
    if size < SMALLEST_HEAD:
        return f"takes heads of at least {SMALLEST_HEAD} channels, not {size}"
    return f"gains nothing on rows of fewer than {TILE} tokens, as in generation" if length < TILE else None


def attention(inputs: AttentionInputs) -> Tensor:
    """All rows in one call."""
    q_BLHK, keys, values, window, documents_BL, memory = inputs
    if memory is not None:
        keys = torch.cat((memory.keys_BMGK, keys), dim=1)
        values = torch.cat((memory.values_BMGK, values), dim=1)
    if documents_BL is None and memory is None:
        mask = _mask_of_sizes(*q_BLHK.shape[:2], window, q_BLHK.device)
    else:
        mask = block_mask(seen_keys(inputs), keys.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, keys, values))
    attend = _kernel() if q.is_cuda else flex_attention
    return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


FLEX = Implementation("flex", attention, "cuda", unsupported_reason=_unsupported_reason)
