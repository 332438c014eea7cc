"""Span-expanded attention's state, and the choice of blocks from a document's past and from the row.

A row may begin anywhere in its document, even inside a chunk or a block. The state lets it continue as if the earlier
tokens were in the row. It has summaries for the complete blocks to choose from, query sums for the last blocks, and the
unfinished block's queries. (Keys and values are carried besides, as for any attention.) One exception: if a chunk's own
queries choose, a row that ends inside a chunk chooses with the queries up to its end. So a document that is cut into
rows gives the same results as uncut only if the cuts are at multiples of M.

Legend as in `reference` and `choice`; P carried blocks.
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
    """Each row's queries in the unfinished block, and summaries and query sums of its last complete blocks.

    When carried, entries are at the end of their axis, with zeros before them: (B, block - 1, H, K), (B, P, H, K),
    (B, P', H, K). For a segment that is being computed, its own queries, summaries and query sums follow.
    """

    queries_BNHK: Tensor
    summaries_BPHK: Tensor
    sums_BPHK: Tensor


class ChoiceRule(NamedTuple):
    """The rule that chooses a chunk's blocks: at most `most`, by the previous chunk's queries or by its own.

    Landmarks, if given, replace the blocks' queries in the block summaries.
    """

    most: int
    previous: bool
    landmarks_HK: Tensor | None = None


class CarriedBlocks(NamedTuple):
    """The number of last blocks that are carried: their summaries (None for all) and their query sums."""

    summaries: int | None
    sums: int


class Whole(NamedTuple):
    """Full rows: their length and number of key/value heads, and a function from a segment to its `SpanPast`."""

    length: int
    groups: int
    known: Callable[[SpanSegment], SpanPast]


@torch.no_grad()
def choose_by_relevance(
    cut: SpanCut, rule: ChoiceRule, rows: Whole, carried: CarriedBlocks
) -> tuple[list[Tensor | None], SpanPast]:
    """Choose blocks for every chunk of every segment; return them, and the state that the next rows continue from."""
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
    """Choose random past blocks for every chunk: a pure function of the key, row, head group, chunk and block."""
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
    """Compute a segment's queries, summaries and query sums, behind the carried ones, from its full q, k and v.

    If `past` is None, no document continues from before the rows.
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
    """Append the summaries and query sums of a segment's own blocks to the carried ones."""
    if past is None or not segment.seen:
        return new
    carried = past.summaries_BPHK[segment.rows], past.sums_BPHK[segment.rows]
    return SpanPast(new.queries_BNHK, *(torch.cat(pair, dim=1) for pair in zip(carried, new[1:], strict=True)))


class OwnBlocks(NamedTuple):
    """A segment's blocks that end in one sequence shard: those from `begin` to `end` - 1."""

    begin: int
    end: int
    counted: int  # all blocks of the segment, an incomplete one included
    whole: int  # its complete blocks
    tokens: slice  # the tokens of the row that these blocks consist of


def own_blocks(cut: SpanCut, segment: SpanSegment, share: slice) -> OwnBlocks:
    """Return the segment's blocks that belong to a sequence shard, because their last token is in it."""
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
    """Return the last `count` entries of the second axis, with zeros before them if there are fewer."""
    missing = max(0, count - x.shape[1])
    return F.pad(x[:, x.shape[1] + missing - count :], (0, 0, 0, 0, missing, 0))


def _choice(cut: SpanCut, rule: ChoiceRule, segment: SpanSegment, known: SpanPast, groups: int) -> Tensor | None:
    chunks = cut.chunks(segment)
    per_chunk = cut.chunk // cut.block
    unfinished = -(-segment.end_place // cut.block)
    # query sums per chunk, beginning with the chunk before the segment's first one
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
    """Return the state after the rows, made from the segments that they end with."""
    count = carried.summaries
    if count is None:
        count = max(segment.end_place // block for segment, _ in ended)
    parts = []
    for segment, known in sorted(ended, key=lambda pair: pair[0].rows.start):
        under_way = segment.end_place % block
        queries = known.queries_BNHK[:, known.queries_BNHK.shape[1] - under_way :]
        if under_way:
            sums = known.sums_BPHK[:, :-1]
        else:
            sums = known.sums_BPHK
        parts.append((_last(queries, block - 1), _last(known.summaries_BPHK, count), _last(sums, carried.sums)))
    return SpanPast(*(torch.cat(part) for part in zip(*parts, strict=True)))
