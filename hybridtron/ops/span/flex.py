"""Span-expanded attention by FlexAttention, for CUDA: one kernel for all rows.

A token sees its chunk's tokens up to itself, and the earlier blocks that were chosen for its chunk. The mask is
computed from small tensors: each token's chunk and block, and a table of the blocks that each chunk has chosen. Matrix
multiplications with this table find the tiles (128 queries by 128 keys) in which some query may see a key. The kernel
skips all other tiles, so no L x S tensor is stored. FlexAttention has no backward pass on a CPU; tests on a CPU cover
its forward pass.

A segment is a range of tokens in a row that belong to one document.

Legend: B rows (sequences in a batch), R rows in a segment, L tokens, S keys (remembered keys of the row's first
document, then the row's L keys), N tokens (L or S), H query heads, G key/value heads, K head size, T chunks, U blocks.
In `chosen_RGTC`, C is the number of blocks chosen for a chunk. In tensors about tiles, Q is the number of query tiles,
and C is the number of key tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.flex_tiles import TILE, attend_to_tiles, flex_unsupported_reason, mask_of_tiles
from hybridtron.ops.span.reference import SpanInputs, chosen_table

NOWHERE = -1


class SpanPlaces(NamedTuple):
    """Each token's chunk and block, and the table of chosen blocks.

    Chunks and blocks are numbered over all segments in a row. A key that no segment can read has chunk -1 and block
    -1. A key that can be read only as part of a chosen block has chunk -1. table_BGTU is True where a chunk has chosen
    a block.
    """

    query_chunks_BL: Tensor
    key_chunks_BS: Tensor
    key_blocks_BS: Tensor
    table_BGTU: Tensor


def places_of(inputs: SpanInputs) -> SpanPlaces:
    """Compute each token's chunk and block, and the table of chosen blocks, for all rows."""
    q_BLHK, k_BSGK, _, cut, chosen = inputs
    (batch, length) = q_BLHK.shape[:2]
    (total, groups) = k_BSGK.shape[1:3]
    device = q_BLHK.device
    counted = [(0, 0)] * batch
    query_chunks_BL = torch.full((batch, length), NOWHERE, device=device)
    key_chunks_BS, key_blocks_BS = (torch.full((batch, total), NOWHERE, device=device) for _ in range(2))
    tables: list[tuple[slice, int, int, Tensor]] = []
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        rows = segment.rows
        here = segment.keys(length, total)
        (chunks, blocks) = counted[segment.rows.start]
        places = torch.arange(segment.first_place, segment.end_place, device=device)
        chunk_numbers = (places + cut.shift) // cut.chunk - cut.chunks(segment).start
        key_chunks_BS[rows, here] = torch.where(chunk_numbers < 0, NOWHERE, chunk_numbers + chunks)
        query_chunks_BL[rows, segment.start : segment.stop] = chunk_numbers[segment.kept :] + chunks
        key_blocks_BS[rows, here] = (places - segment.first_place) // cut.block + blocks
        held = -(-(segment.end_place - segment.first_place) // cut.block)
        if chosen_RGTC is not None:
            tables.append((rows, chunks, blocks, chosen_table(chosen_RGTC, held)))
        after = chunks + len(cut.chunks(segment)), blocks + held
        counted[rows] = [after] * (rows.stop - rows.start)
    sizes = (max(count) for count in zip(*counted, strict=True))
    table_BGTU = torch.zeros(batch, groups, *sizes, dtype=torch.bool, device=device)
    for rows, chunks, blocks, table in tables:
        table_BGTU[rows, :, chunks : chunks + table.shape[2], blocks : blocks + table.shape[3]] = table
    return SpanPlaces(query_chunks_BL, key_chunks_BS, key_blocks_BS, table_BGTU)


def mask_of(places: SpanPlaces, share: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask function for FlexAttention; the mask function returns True if a query sees a key.

    The function's arguments are the row, the query head, the query's index in the row, and the key's index among all S
    keys. Each key/value head has `share` query heads.
    """
    before = places.key_chunks_BS.shape[1] - places.query_chunks_BL.shape[1]
    key_blocks_BS = places.key_blocks_BS.clamp(min=0)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        chunk = places.query_chunks_BL[b, query]
        in_own_chunk = (chunk == places.key_chunks_BS[b, key]) & (key <= query + before)
        chosen = places.table_BGTU[b, h // share, chunk, key_blocks_BS[b, key]]
        return in_own_chunk | (chosen & (places.key_blocks_BS[b, key] >= 0))

    return sees


def tiles_of(places: SpanPlaces) -> Tensor:
    """Return a mask for the tiles in which some query may see some key, (B, G, L / 128, S / 128)."""
    chunks, blocks = places.table_BGTU.shape[2:]
    queries_BQT = _held(places.query_chunks_BL, chunks)
    key_chunks_BCT = _held(places.key_chunks_BS, chunks)
    key_blocks_BCU = _held(places.key_blocks_BS, blocks)
    length = places.query_chunks_BL.shape[1]
    total = places.key_chunks_BS.shape[1]
    last_Q = torch.arange(queries_BQT.shape[1], device=queries_BQT.device) * TILE + TILE - 1
    first_C = torch.arange(key_chunks_BCT.shape[1], device=queries_BQT.device) * TILE
    in_own_chunk_BQC = (queries_BQT @ key_chunks_BCT.mT > 0) & (first_C <= last_Q[:, None] + total - length)
    chosen_BGQC = queries_BQT[:, None] @ places.table_BGTU.float() @ key_blocks_BCU[:, None].mT > 0
    return in_own_chunk_BQC[:, None] | chosen_BGQC


def _held(numbers_BN: Tensor, count: int) -> Tensor:
    """Return a table (B, N / 128, count): 1 where a tile of 128 tokens has a token of a chunk or block, else 0.

    `numbers_BN` holds each token's chunk or block, and `count` is the number of chunks or blocks.
    """
    tiles_BNT = F.pad(numbers_BN, (0, -numbers_BN.shape[1] % TILE), value=NOWHERE).unflatten(1, (-1, TILE))
    held = torch.zeros(*tiles_BNT.shape[:2], count + 1, device=numbers_BN.device)
    return held.scatter_(-1, torch.where(tiles_BNT < 0, count, tiles_BNT), 1.0)[..., :count]


def span_attention(inputs: SpanInputs) -> Tensor:
    """Compute span attention for all rows and segments in one call of FlexAttention."""
    q_BLHK, k_BSGK, v_BSGK, _, _ = inputs
    places = places_of(inputs)
    share = q_BLHK.shape[2] // k_BSGK.shape[2]
    tiles_BHQC = tiles_of(places).repeat_interleave(share, dim=1)
    lengths = q_BLHK.shape[1], k_BSGK.shape[1]
    return attend_to_tiles(q_BLHK, k_BSGK, v_BSGK, mask_of_tiles(mask_of(places, share), lengths, tiles_BHQC))


def _unsupported_reason(inputs: SpanInputs) -> str | None:
    return flex_unsupported_reason(inputs.q_BLHK)


FLEX = Implementation("flex", span_attention, "cuda", unsupported_reason=_unsupported_reason)
