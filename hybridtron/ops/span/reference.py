"""Span-expanded attention (SE-Attn): tokens attend to their own chunk and to selected earlier blocks.

    chunk t  the tokens t * M to t * M + M - 1 in a document
    block u  the tokens u * b to u * b + b - 1 in the document; b divides M
    y_i = sum_j a_ij v_j,   a_i = softmax_j(q_i . k_j / sqrt(K)) over the visible j

Token i sees two sets of tokens: the tokens j <= i in its own chunk, and all tokens in the blocks that were chosen for
its chunk and its key/value head. Chosen blocks end before the chunk begins; `choice` has the rules that choose them.
Queries and keys arrive with rotary position embedding already applied. If no blocks are chosen, this is attention
inside chunks. For shifted sparse attention, every chunk begins `shift` tokens earlier, so that the first chunk is
shorter.

A row is a sequence in the batch. Rows are divided into segments: a segment is consecutive tokens in one document.
Chunks and blocks are counted from the document's start. If the document began in an earlier row, its remembered keys
precede the row's keys.

Legend: B rows, R rows in a segment, L tokens, H query heads, G key/value heads (query head h reads key/value head
h // (H // G)), A = H / G query heads for a key/value head, K head size, S keys (first the remembered keys, then the
row's L keys), T chunks that a segment touches, U blocks, C blocks chosen for a chunk. In the equations, a chunk has M
tokens, and a block has b tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class SpanSegment(NamedTuple):
    """Consecutive tokens in one document, at the same positions in several rows.

    The tokens are at positions `start` to `stop` - 1 in the rows `rows`. `seen` counts the document's tokens in earlier
    rows. The last `kept` of these tokens can still be read: their keys precede the row's own keys. The first kept token
    begins a block.
    """

    rows: slice
    start: int
    stop: int
    seen: int = 0
    kept: int = 0

    @property
    def first_place(self) -> int:
        """Position in the document of the first token whose key can be read."""
        return self.seen - self.kept

    @property
    def end_place(self) -> int:
        """Position in the document just after the segment's last token."""
        return self.seen + self.stop - self.start

    def keys(self, own: int, total: int) -> slice:
        """Return the slice of the segment's keys, including the kept keys, among all keys.

        `total` is the number of all keys; the last `own` keys are the row's own keys.
        """
        return slice(total - own + self.start - self.kept, total - own + self.stop)


class SpanCut(NamedTuple):
    """The division of rows into segments, chunks and blocks; `chunk`, `block` and `shift` count tokens."""

    chunk: int
    block: int
    segments: Sequence[SpanSegment]
    shift: int = 0

    def chunks(self, segment: SpanSegment) -> range:
        """Return the indices of all chunks with tokens in a segment, counted from the document's start."""
        last = (segment.end_place - 1 + self.shift) // self.chunk
        return range((segment.seen + self.shift) // self.chunk, last + 1)

    def available(self, segment: SpanSegment) -> list[int]:
        """Return, for each chunk in a segment, the number of blocks from which it can choose.

        These blocks are complete, end before the chunk begins, and have keys that can be read.
        """
        begins = (chunk * self.chunk - self.shift for chunk in self.chunks(segment))
        return [max(0, begin - segment.first_place) // self.block for begin in begins]


class ChunkSpan(NamedTuple):
    """A chunk inside a segment.

    queries   the slice of the chunk's queries in the row
    keys      the slice of the chunk's own keys among all S keys
    count     how many blocks are chosen for the chunk
    """

    queries: slice
    keys: slice
    count: int


def chunk_spans(cut: SpanCut, segment: SpanSegment, before: int, most: int) -> Iterator[ChunkSpan]:
    """Yield a segment's chunks, each with at most `most` chosen blocks.

    `before` keys precede the row's own keys, so the key of the row's token i has the index `before` + i.
    """
    into_row = segment.start - segment.seen
    for chunk, available in zip(cut.chunks(segment), cut.available(segment), strict=True):
        begin = chunk * cut.chunk - cut.shift
        end = min(begin + cut.chunk, segment.end_place)
        queries = slice(max(begin, segment.seen) + into_row, end + into_row)
        keys = slice(max(begin, segment.first_place) + into_row + before, end + into_row + before)
        yield ChunkSpan(queries, keys, min(most, available))


def chosen_table(chosen_RGTC: Tensor, blocks: int) -> Tensor:
    """Return a mask (R, G, T, U), True where a chunk chose a block.

    U is `blocks`. Entries -1 in the input are padding.
    """
    table = torch.zeros(*chosen_RGTC.shape[:3], blocks + 1, dtype=torch.bool, device=chosen_RGTC.device)
    return table.scatter_(-1, torch.where(chosen_RGTC < 0, blocks, chosen_RGTC), True)[..., :blocks]


def _visible(cut: SpanCut, segment: SpanSegment, chosen_RGTC: Tensor | None, device: torch.device) -> Tensor:
    """Return a segment's mask, True where a query sees a key.

    The shape is (R, G, L, S), or (1, 1, L, S) without chosen blocks; here L and S count the segment's tokens and keys.
    """
    places_S = torch.arange(segment.first_place, segment.end_place, device=device)
    chunks_S = (places_S + cut.shift) // cut.chunk
    places_L = places_S[segment.kept :]
    chunks_L = chunks_S[segment.kept :]
    in_own_chunk_LS = (chunks_L[:, None] == chunks_S) & (places_S <= places_L[:, None])
    if chosen_RGTC is None:
        return in_own_chunk_LS[None, None]
    blocks_S = (places_S - segment.first_place) // cut.block
    table_RGTU = chosen_table(chosen_RGTC, int(blocks_S[-1]) + 1)
    return in_own_chunk_LS | table_RGTU[:, :, chunks_L - cut.chunks(segment).start][..., blocks_S]


class SpanInputs(NamedTuple):
    """Queries, keys and values, the division of their rows, and the blocks chosen for each chunk.

    `chosen` has an entry for each segment: the indices (R, G, T, C) of the blocks that each chunk reads, or None if no
    chunk in the segment reads a block. Block 0 begins at the segment's first readable key. Chunks with fewer than C
    blocks are padded with -1.
    """

    q_BLHK: Tensor
    k_BSGK: Tensor
    v_BSGK: Tensor
    cut: SpanCut
    chosen: Sequence[Tensor | None]


def span_attention(inputs: SpanInputs) -> Tensor:
    """Return the output (B, L, H, K), computed with a dense mask and a softmax in at least fp32."""
    q_BLHK, k_BSGK, v_BSGK, cut, chosen = inputs
    y_BLHK = torch.zeros_like(q_BLHK)
    share = q_BLHK.shape[2] // k_BSGK.shape[2]
    groups = k_BSGK.shape[2]
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        here = segment.keys(q_BLHK.shape[1], k_BSGK.shape[1])
        q_RLGAK = at_least_fp32(q_BLHK[segment.rows, segment.start : segment.stop]).unflatten(2, (groups, share))
        k_RSGK, v_RSGK = (at_least_fp32(x[segment.rows, here]) for x in (k_BSGK, v_BSGK))
        visible = _visible(cut, segment, chosen_RGTC, q_BLHK.device)[:, :, None]
        scores_RGALS = torch.einsum("rlgak,rsgk->rgals", q_RLGAK, k_RSGK) * q_BLHK.shape[-1] ** -0.5
        weights_RGALS = scores_RGALS.masked_fill(~visible, -torch.inf).softmax(-1)
        y_RLHK = torch.einsum("rgals,rsgk->rlgak", weights_RGALS, v_RSGK).flatten(2, 3)
        y_BLHK[segment.rows, segment.start : segment.stop] = y_RLHK.to(q_BLHK.dtype)
    return y_BLHK
