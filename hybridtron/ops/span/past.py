"""Span-expanded attention's state between rows, and the choice of blocks from a document's past and from the row.

In span-expanded attention a document is divided into chunks, and more finely into blocks. A chunk attends to itself and
to the earlier blocks that it chooses: the blocks whose summaries have the largest dot products with summed queries
(`choice`).

A document may be longer than a row (a sequence in the batch). Then the next row continues it with the previous row's
state, as if the earlier tokens were in the row. A row may begin anywhere in its document, even inside a chunk or a
block. The state has three tensors:

    queries     the last block's queries, if the previous row ended inside this block
    summaries   the summary of each complete block; chunks choose among these blocks
    query sums  the sum of the queries in each of the last complete blocks; these queries make the choice

The past keys and values are carried separately, as for any attention.

If a chunk's own queries choose its blocks, and a row ends inside the chunk, only the chunk's queries up to the row's
end choose. The results then differ from those for a document in a single row. So if a chunk's own queries choose,
results are independent of the division into rows only if rows end at multiples of the chunk size.

A segment is a range of tokens in a row that belong to one document. Rows with the same range are computed together.

Legend: B rows, R rows in a segment, L tokens in a row, S keys (remembered keys of the row's first document, then the
row's L keys), N tokens in a segment and in the unfinished block before it, H query heads, G key/value heads, K head
size, T chunks, C chosen blocks, P carried blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.span.choice import choose, query_sums, random_relevance, relevance, summaries
from hybridtron.ops.span.reference import SpanCut, SpanSegment


class SpanPast(NamedTuple):
    """The unfinished block's queries, and the last complete blocks' summaries and query sums.

    This class has two uses:

        between rows    shapes (B, block - 1, H, K), (B, P, H, K) and (B, P', H, K), where P' counts the carried
                        query sums; if fewer entries exist, zeros precede them on the second axis
        in a segment    each tensor holds the carried entries, then the segment's own queries, summaries or query sums
    """

    queries_BNHK: Tensor
    summaries_BPHK: Tensor
    sums_BPHK: Tensor


class ChoiceRule(NamedTuple):
    """The rule by which a chunk chooses its blocks.

    `most` is the maximum number of blocks. If `previous` is True, the previous chunk's queries choose, else the chunk's
    own queries choose. Landmarks (None: no landmarks) replace the blocks' queries in the block summaries.
    """

    most: int
    previous: bool
    landmarks_HK: Tensor | None = None


class CarriedBlocks(NamedTuple):
    """The sizes of the state: how many block summaries (None for all) and how many query sums are carried."""

    summaries: int | None
    sums: int


class Whole(NamedTuple):
    """Full rows: their length, their number of key/value heads, and a function that returns a segment's `SpanPast`.

    With context parallelism a rank holds only a shard of each row. The function then combines all ranks' shards.
    """

    length: int
    groups: int
    known: Callable[[SpanSegment], SpanPast]


@torch.no_grad()
def choose_by_relevance(
    cut: SpanCut, rule: ChoiceRule, rows: Whole, carried: CarriedBlocks
) -> tuple[list[Tensor | None], SpanPast]:
    """Choose the most relevant blocks for every chunk; return the list of choices, and the state after the rows.

    The list has an entry for each segment. The entry is None if no chunk in the segment has a block to choose.
    """
    chosen: list[Tensor | None] = []
    ended: list[tuple[SpanSegment, SpanPast]] = []
    for segment in cut.segments:
        needed = max(cut.available(segment)) > 0
        ends = segment.stop == rows.length
        if not needed and not ends:
            chosen.append(None)
            continue
        known = rows.known(segment)
        chosen.append(_choice(cut, rule, segment, known, rows.groups) if needed else None)
        if ends:
            ended.append((segment, known))
    return chosen, _after(ended, cut.block, carried)


def choose_at_random(
    cut: SpanCut, most: int, key: int, groups: Sequence[int], device: torch.device
) -> list[Tensor | None]:
    """Choose random past blocks for every chunk.

    The returned list has an entry for each segment. The entry is None if no chunk in the segment has a block to choose.
    `key` is the seed, and `groups` are the indices of this rank's key/value heads. A random number depends only on the
    seed, row, key/value head, chunk and block. So the choice does not depend on the parallel layout.
    """
    chosen: list[Tensor | None] = []
    for segment in cut.segments:
        available = cut.available(segment)
        first = segment.first_place // cut.block
        rows = range(segment.rows.start, segment.rows.stop)
        blocks = range(first, first + max(available))
        drawn = random_relevance(key, rows, groups, cut.chunks(segment), blocks).to(device, non_blocking=True)
        chosen.append(choose(drawn, available, most) if blocks else None)
    return chosen


@torch.no_grad()
def known_of(
    cut: SpanCut,
    rule: ChoiceRule,
    heads: tuple[Tensor, Tensor, Tensor],
    past: SpanPast | None,
    segment: SpanSegment,
) -> SpanPast:
    """Compute a segment's queries, summaries and query sums, and append them to the carried entries.

    `heads` is (q, k, v) for the full rows. `past` is the state before the rows; it is None if no document continues
    from earlier rows.
    """
    q_BLHK, k_BSGK, v_BSGK = heads
    under_way = segment.seen % cut.block
    segment_keys = segment.keys(q_BLHK.shape[1], k_BSGK.shape[1])
    here = slice(segment_keys.start + segment.kept - under_way, segment_keys.stop)
    row = q_BLHK[segment.rows, segment.start : segment.stop].detach()
    k_RNGK, v_RNGK = (x[segment.rows, here].detach() for x in (k_BSGK, v_BSGK))
    if past is not None and segment.seen:
        before = past.queries_BNHK[segment.rows]
        row = torch.cat((before[:, before.shape[1] - under_way :].to(row.dtype), row), dim=1)
    new = SpanPast(row, summaries(row, k_RNGK, v_RNGK, cut.block, rule.landmarks_HK), query_sums(row, cut.block))
    return behind(past, segment, new)


def behind(past: SpanPast | None, segment: SpanSegment, new: SpanPast) -> SpanPast:
    """Return `new`, with the carried summaries and query sums put in front of its own summaries and query sums."""
    if past is None or not segment.seen:
        return new
    carried = past.summaries_BPHK[segment.rows], past.sums_BPHK[segment.rows]
    return SpanPast(new.queries_BNHK, *(torch.cat(pair, dim=1) for pair in zip(carried, new[1:], strict=True)))


class OwnBlocks(NamedTuple):
    """A segment's blocks that belong to one sequence shard, because the shard holds their last token.

    A sequence shard is the part of each row that one rank holds. The blocks have the indices `begin` to `end` - 1.
    """

    begin: int
    end: int
    counted: int  # number of blocks in the segment, including an incomplete last block
    whole: int  # number of complete blocks in the segment
    tokens: slice  # tokens of the row from which blocks `begin` to `end` - 1 are computed


def own_blocks(cut: SpanCut, segment: SpanSegment, share: slice) -> OwnBlocks:
    """Return the segment's blocks that belong to a sequence shard; `share` is the shard's slice of the row."""
    base = segment.start - segment.seen % cut.block
    counted = -(-(segment.stop - base) // cut.block)

    def ended(before: int) -> int:
        if segment.stop <= before:
            return counted
        return max(0, (before - base) // cut.block)

    begin = ended(share.start)
    end = ended(share.stop)
    tokens = slice(base + begin * cut.block, min(base + end * cut.block, segment.stop))
    return OwnBlocks(begin, end, counted, (segment.stop - base) // cut.block, tokens)


def _last(x: Tensor, count: int) -> Tensor:
    """Return the last `count` entries on the second axis, with zeros before them if there are fewer."""
    missing = max(0, count - x.shape[1])
    return F.pad(x[:, x.shape[1] + missing - count :], (0, 0, 0, 0, missing, 0))


def _choice(cut: SpanCut, rule: ChoiceRule, segment: SpanSegment, known: SpanPast, groups: int) -> Tensor | None:
    """Return the blocks chosen for each chunk of a segment, (R, G, T, C), or None if no chunk can choose a block."""
    chunks = cut.chunks(segment)
    per_chunk = cut.chunk // cut.block
    unfinished = -(-segment.end_place // cut.block)
    # the sum of queries for each chunk, beginning with the chunk before the segment's first chunk
    sums = _last(known.sums_BPHK, unfinished - (chunks.start - 1) * per_chunk)
    missing = -sums.shape[1] % per_chunk
    sums_RTHK = F.pad(sums, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, per_chunk)).sum(2)
    if rule.previous:
        asking = sums_RTHK[:, : len(chunks)]
    else:
        asking = sums_RTHK[:, 1 : 1 + len(chunks)]
    whole = segment.end_place // cut.block - segment.first_place // cut.block
    of_blocks = _last(known.summaries_BPHK, whole)
    return choose(relevance(asking, of_blocks, groups), cut.available(segment), rule.most)


def _after(ended: Sequence[tuple[SpanSegment, SpanPast]], block: int, carried: CarriedBlocks) -> SpanPast:
    """Return the state after the rows, computed from every row's last segment."""
    count = carried.summaries
    if count is None:
        count = max(segment.end_place // block for segment, _ in ended)
    queries: list[Tensor] = []
    summaries: list[Tensor] = []
    sums: list[Tensor] = []
    for segment, known in sorted(ended, key=lambda pair: pair[0].rows.start):
        under_way = segment.end_place % block
        queries.append(_last(known.queries_BNHK[:, known.queries_BNHK.shape[1] - under_way :], block - 1))
        summaries.append(_last(known.summaries_BPHK, count))
        complete = known.sums_BPHK
        if under_way:
            complete = complete[:, :-1]
        sums.append(_last(complete, carried.sums))
    return SpanPast(torch.cat(queries), torch.cat(summaries), torch.cat(sums))
