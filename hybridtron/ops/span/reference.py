"""Span-expanded attention (SE-Attn): each chunk of a document reads itself and selected earlier blocks.

    chunk t  the tokens t M to t M + M - 1 of a document
    block j  the tokens j S to j S + S - 1 of it; S divides M
    y_i = sum_j a_ij v_j,   a_i = softmax over the visible j of  q_i . k_j / sqrt(K)

Token i sees the tokens j <= i of its own chunk, and all tokens of the blocks that were chosen for its chunk and its
group of heads; those end before the chunk begins. `choice` has the rules by which they are chosen. Positions are not
applied here: queries and keys arrive rotated. Without chosen blocks this is attention inside chunks; `shift` makes
all chunks begin that number of tokens earlier (the first one is then shorter), for shifted sparse attention.

Rows are read as segments: consecutive tokens of one document. Chunks and blocks are counted from the start of the
document, which may lie before the row, in a carried state.

Legend: B rows, R those of a segment, L tokens, H query heads, G key/value heads (query head h reads h // (H // G)),
K head size, S keys in all, of which the row's own are the last L, T chunks that a segment touches, U blocks, C chosen.
In the equations, and in shapes behind U, S is the size of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


class SpanSegment(NamedTuple):
    """Consecutive tokens of one document, at the same position in several rows.

    `seen` tokens of the document came before the row. The keys of the last `kept` tokens among them precede the row's
    own keys and may be read; the first of these tokens begins a block.
    """

    rows: slice
    start: int
    stop: int
    seen: int = 0
    kept: int = 0

    @property
    def first_place(self) -> int:
        """Position in the document of the first token whose key is available."""
        return self.seen - self.kept

    @property
    def end_place(self) -> int:
        """Position in the document after the segment's last token."""
        return self.seen + self.stop - self.start

    def keys(self, own: int, total: int) -> slice:
        """Return the slice of the segment's keys among all `total` keys; the last `own` are the row's."""
        return slice(total - own + self.start - self.kept, total - own + self.stop)


class SpanCut(NamedTuple):
    """The division of rows into segments, chunks and blocks; `chunk`, `block` and `shift` count tokens."""

    chunk: int
    block: int
    segments: Sequence[SpanSegment]
    shift: int = 0

    def chunks(self, segment: SpanSegment) -> range:
        """Return the indices of all chunks that a segment touches, counted from its document's start."""
        last = (segment.end_place - 1 + self.shift) // self.chunk
        return range((segment.seen + self.shift) // self.chunk, last + 1)

    def available(self, segment: SpanSegment) -> list[int]:
        """Count, for each chunk of a segment, the available blocks that end before the chunk begins."""
        begins = (chunk * self.chunk - self.shift for chunk in self.chunks(segment))
        return [max(0, begin - segment.first_place) // self.block for begin in begins]


class ChunkSpan(NamedTuple):
    """A chunk: its queries' slice in the row, its own keys' slice among all keys, and how many blocks are chosen."""

    queries: slice
    keys: slice
    count: int


def chunk_spans(cut: SpanCut, segment: SpanSegment, before: int, most: int) -> Iterator[ChunkSpan]:
    """Yield the chunks of a segment, with at most `most` chosen blocks; the key of token i is at index before + i."""
    into_row = segment.start - segment.seen
    for chunk, available in zip(cut.chunks(segment), cut.available(segment), strict=True):
        begin = chunk * cut.chunk - cut.shift
        end = min(begin + cut.chunk, segment.end_place)
        queries = slice(max(begin, segment.seen) + into_row, end + into_row)
        keys = slice(max(begin, segment.first_place) + into_row + before, end + into_row + before)
        yield ChunkSpan(queries, keys, min(most, available))


def chosen_table(chosen_RGTC: Tensor, blocks: int) -> Tensor:
    """Return a mask of the chosen ones among the first `blocks` blocks, (R, G, T, U); entries of -1 mean no block."""
    table = torch.zeros(*chosen_RGTC.shape[:3], blocks + 1, dtype=torch.bool, device=chosen_RGTC.device)
    return table.scatter_(-1, torch.where(chosen_RGTC < 0, blocks, chosen_RGTC), True)[..., :blocks]


def _visible(cut: SpanCut, segment: SpanSegment, chosen_RGTC: Tensor | None, device: torch.device) -> Tensor:
    """Return a segment's mask, True where a query sees a key, (1, 1, L, S) or (R, G, L, S)."""
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

    `chosen` holds for each segment the blocks of each chunk, (R, G, T, C), counted from the first available key. Chunks
    with fewer than C blocks are filled up with -1. None stands for a segment whose chunks have no blocks.
    """

    q_BLHK: Tensor
    k_BSGK: Tensor
    v_BSGK: Tensor
    cut: SpanCut
    chosen: Sequence[Tensor | None]


def span_attention(inputs: SpanInputs) -> Tensor:
    """Compute attention by the rules, with a dense mask and an fp32 softmax."""
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
