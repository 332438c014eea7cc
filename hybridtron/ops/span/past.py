"""What span-expanded attention knows of a document's past, and the choice of blocks from it and from the row.

A row may begin anywhere in its document: in mid-chunk and in mid-block. What the tokens before it left is enough to go
on as if they stood in the row: the summaries of the whole blocks that it may choose from, the sums of queries of the
last ones, and the queries of the block under way. (Keys and values are kept beside it, as those of any attention.) One
exception: where the chunk's own queries choose, a row that ends in mid-chunk chooses with the queries that it has, so
that rows equal the whole only where they are cut at multiples of M.

Legend as in `span` and `span_choice`; P carried blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.span.choice import choose, query_sums, random_relevance, relevance, summaries
from hybridtron.ops.span.reference import Cut, Stretch


class Past(NamedTuple):
    """Carried of each row: the queries of its block under way, summaries and query sums of the last whole blocks.

    All stand at the end of their axis, with zeros before them: (B, S - 1, H, K), (B, P, H, K), (B, P', H, K).
    """

    queries_BNHK: Tensor
    summaries_BPHK: Tensor
    sums_BPHK: Tensor


class Rule(NamedTuple):
    """How many blocks a chunk chooses, by the queries of the chunk before it or its own, and who asks the summaries."""

    most: int
    previous: bool
    landmarks_HK: Tensor | None = None


class Held(NamedTuple):
    """Of how many of a document's last blocks summaries are handed on (None: of all), and of how many query sums."""

    summaries: int | None
    sums: int


class _Known(NamedTuple):
    """Of one stretch: its last queries; summaries and sums of its blocks, of those before the row as far as carried."""

    queries_RNHK: Tensor
    summaries_RUHK: Tensor
    sums_RUHK: Tensor


@torch.no_grad()
def choose_by_relevance(
    cut: Cut, rule: Rule, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, past: Past | None, held: Held
) -> tuple[list[Tensor | None], Past]:
    """The blocks of every chunk of every stretch, and the past of what comes after the rows.

    Without a past all rows begin their documents.
    """
    chosen: list[Tensor | None] = []
    ended: list[tuple[Stretch, _Known]] = []
    for stretch in cut.stretches:
        needed = max(cut.available(stretch)) > 0
        ends = stretch.stop == q_BLHK.shape[1]
        if not needed and not ends:
            chosen.append(None)
            continue
        known = _known(cut, rule, stretch, q_BLHK, k_BSGK, v_BSGK, past)
        chosen.append(_choice(cut, rule, stretch, known, k_BSGK.shape[2]) if needed else None)
        if ends:
            ended.append((stretch, known))
    return chosen, _after(ended, cut.block, held)


def choose_at_random(cut: Cut, most: int, key: int, groups: Sequence[int], device: torch.device) -> list[Tensor | None]:
    """Random blocks of the past for every chunk: a function of the key, the row, its group, its chunk and the block."""
    chosen: list[Tensor | None] = []
    for stretch in cut.stretches:
        available = cut.available(stretch)
        first = stretch.first_place // cut.block
        rows, blocks = range(stretch.rows.start, stretch.rows.stop), range(first, first + max(available))
        drawn = random_relevance(key, rows, groups, cut.chunks(stretch), blocks).to(device)
        chosen.append(choose(drawn, available, most) if blocks else None)
    return chosen


def _known(
    cut: Cut, rule: Rule, stretch: Stretch, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, past: Past | None
) -> _Known:
    under_way = stretch.seen % cut.block
    own = stretch.keys(q_BLHK.shape[1], k_BSGK.shape[1])
    here = slice(own.start + stretch.kept - under_way, own.stop)
    row = q_BLHK[stretch.rows, stretch.start : stretch.stop].detach()
    k_RNGK, v_RNGK = (x[stretch.rows, here].detach() for x in (k_BSGK, v_BSGK))
    if past is not None and stretch.seen:
        before = past.queries_BNHK[stretch.rows]
        row = torch.cat((before[:, before.shape[1] - under_way :].to(row.dtype), row), dim=1)
    new = summaries(row, k_RNGK, v_RNGK, cut.block, rule.landmarks_HK), query_sums(row, cut.block)
    if past is None or not stretch.seen:
        return _Known(row, *new)
    carried = past.summaries_BPHK[stretch.rows], past.sums_BPHK[stretch.rows]
    return _Known(row, *(torch.cat(pair, dim=1) for pair in zip(carried, new, strict=True)))


def _last(x: Tensor, count: int) -> Tensor:
    """The last so many entries of the second axis, zeros before them where there are fewer."""
    missing = max(0, count - x.shape[1])
    return F.pad(x[:, x.shape[1] + missing - count :], (0, 0, 0, 0, missing, 0))


def _choice(cut: Cut, rule: Rule, stretch: Stretch, known: _Known, groups: int) -> Tensor | None:
    chunks, per_chunk = cut.chunks(stretch), cut.chunk // cut.block
    unfinished = -(-stretch.end_place // cut.block)
    # the sums of all blocks from the chunk before the first one on, as those of chunks
    sums = _last(known.sums_RUHK, unfinished - (chunks.start - 1) * per_chunk)
    missing = -sums.shape[1] % per_chunk
    sums_RTHK = F.pad(sums, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, per_chunk)).sum(2)
    asking = sums_RTHK[:, : len(chunks)] if rule.previous else sums_RTHK[:, 1 : 1 + len(chunks)]
    whole = stretch.end_place // cut.block - stretch.first_place // cut.block
    of_blocks = _last(known.summaries_RUHK, whole)
    return choose(relevance(asking, of_blocks, groups), cut.available(stretch), rule.most)


def _after(ended: Sequence[tuple[Stretch, _Known]], block: int, held: Held) -> Past:
    """What comes after the rows needs, of the stretches that they end with."""
    count = held.summaries
    if count is None:
        count = max(stretch.end_place // block for stretch, _ in ended)
    parts = []
    for stretch, known in sorted(ended, key=lambda pair: pair[0].rows.start):
        under_way = stretch.end_place % block
        queries = known.queries_RNHK[:, known.queries_RNHK.shape[1] - under_way :]
        sums = known.sums_RUHK[:, :-1] if under_way else known.sums_RUHK
        parts.append((_last(queries, block - 1), _last(known.summaries_RUHK, count), _last(sums, held.sums)))
    return Past(*(torch.cat(part) for part in zip(*parts, strict=True)))
