"""The visible pairs of sparse attention, in a form whose memory and time grow linearly with the token count.

Rules select the keys that a query sees: the recent, first or strided keys, the keys in the query's hash bin, or the
keys with the best scores (`reference`). The pairs (query, key) that one rule selects are called a part. There are two
kinds of parts:

Stretch  for all rules except `best`. Keys are sorted by a class: their document, or their bin inside a document. Keys
         in one class stay in text order. A query sees a contiguous range of the sorted keys: the last keys in its class
         up to its own token, or the first keys in its class.
Kept     for the rule `best`. A key is seen by all queries in its document from the key's own token on, until the key is
         no longer among the best. A key that has dropped out never returns, since the number of better keys only grows.
         So one integer per key describes the part: the first token whose query no longer sees the key.

A part can test whether it contains a given pair. It can also list its pairs as tiles. A tile is a few queries, and a
list of keys that contains all keys that these queries see in this part.

Legend: R rows (a row for each sequence in the batch and each head group), L queries, S keys (remembered keys of the
row's first document, then the row's L keys), T tiles, Q queries per tile, W keys per tile, N bands (see `TILE`), C best
keys before a tile, K best keys after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.sparse.reference import Seen

TILE = 64
"""Number of queries in a tile, and number of sorted keys in a band (`Stretch.tiles`)."""


class Tiles(NamedTuple):
    """Indices for each tile's queries and keys; -1 is padding.

    Indices are counted over all rows: query l in row r has index r * L + l, and key s in row r has index r * S + s.
    """

    queries_TQ: Tensor
    keys_TW: Tensor


class PatternPart(Protocol):
    """The pairs (query, key) that one rule selects."""

    def sees(self, tiles: Tiles) -> Tensor:
        """Return a mask (T, Q, W) for some tiles, True where a pair is in this part.

        Entries for padding have no meaning.
        """
        ...

    def tiles(self) -> Tiles:
        """Return tiles that contain every pair in this part exactly once."""
        ...


class Stretch(NamedTuple):
    """Sorted keys, of which each query sees a contiguous range.

    order_RS lists the sorted keys' indices. A key's rank is its position in this list. A query sees the keys with ranks
    first_RL to end_RL - 1. The keys from the query's document begin at rank begin_RL.
    """

    order_RS: Tensor
    begin_RL: Tensor
    first_RL: Tensor
    end_RL: Tensor

    def sees(self, tiles: Tiles) -> Tensor:
        rank_TW = inverse(self.order_RS).flatten()[tiles.keys_TW]
        first_TQ, end_TQ = (x_RL.flatten()[tiles.queries_TQ] for x_RL in (self.first_RL, self.end_RL))
        return (first_TQ[..., None] <= rank_TW[:, None]) & (rank_TW[:, None] < end_TQ[..., None])

    def tiles(self) -> Tiles:
        """Return this part's tiles.

        A band is TILE sorted keys. Queries whose ranges end within the same band share tiles. Bands are counted from a
        document's first key, so a document's tiles do not depend on its position in the row.
        """
        (rows, total) = self.order_RS.shape
        device = self.order_RS.device
        row_R1 = torch.arange(rows, device=device)[:, None]
        # for each query, the first rank of the band in which its range ends; these ranks are counted over all rows
        band_RL = row_R1 * total + self.begin_RL + (self.end_RL - 1 - self.begin_RL) // TILE * TILE
        asking = (self.first_RL < self.end_RL).flatten().nonzero().squeeze(1)
        by_band, sorted_ = band_RL.flatten()[asking].sort(stable=True)
        bands_N, count_N = by_band.unique_consecutive(return_counts=True)
        tiles_N = -(-count_N // TILE)
        # place: a query's position among the queries of its band; tile: the index of the query's tile
        place = torch.arange(len(asking), device=device) - (count_N.cumsum(0) - count_N).repeat_interleave(count_N)
        tile = (tiles_N.cumsum(0) - tiles_N).repeat_interleave(count_N) + place // TILE
        band_T = bands_N.repeat_interleave(tiles_N)
        queries_TQ = torch.full((len(band_T), TILE), -1, device=device)
        queries_TQ[tile, place % TILE] = asking[sorted_]
        # ranges have at most `most` keys, so the keys of a tile begin at most `most` - 1 ranks before its band
        most = int((self.end_RL - self.first_RL).max())
        ranks_TW = (band_T % total)[:, None] + torch.arange(1 - most, TILE, device=device)
        row_T1 = (band_T // total)[:, None]
        keys_TW = self.order_RS[row_T1, ranks_TW.clamp(0, total - 1)] + row_T1 * total
        return Tiles(queries_TQ, keys_TW.where((ranks_TW >= 0) & (ranks_TW < total), -1))


class Kept(NamedTuple):
    """Keys that queries see until the keys are no longer among the best.

    A key is seen by the queries from its own token to token until_RS - 1, where a token's index is its key's index.
    candidates_RTW lists the keys that some query of a tile may see; -1 is padding. `length` is L.
    """

    until_RS: Tensor
    candidates_RTW: Tensor
    length: int

    def sees(self, tiles: Tiles) -> Tensor:
        total = self.until_RS.shape[1]
        query_places_TQ = (tiles.queries_TQ % self.length + total - self.length)[..., None]
        from_TW = tiles.keys_TW % total
        until_TW = self.until_RS.flatten()[tiles.keys_TW]
        return (from_TW[:, None] <= query_places_TQ) & (query_places_TQ < until_TW[:, None])

    def tiles(self) -> Tiles:
        (rows, total) = self.until_RS.shape
        device = self.until_RS.device
        row_R11 = torch.arange(rows, device=device)[:, None, None]
        padded = -(-self.length // TILE) * TILE
        queries_TQ = torch.arange(padded, device=device).view(-1, TILE)
        queries_RTQ = torch.where(queries_TQ < self.length, queries_TQ + row_R11 * self.length, -1)
        keys_RTW = torch.where(self.candidates_RTW < 0, -1, self.candidates_RTW + row_R11 * total)
        return Tiles(queries_RTQ.flatten(0, 1), keys_RTW.flatten(0, 1))


def parts_of(seen: Seen, length: int) -> Iterator[PatternPart]:
    """Yield one part for each rule that is on; two parts may contain the same pair."""
    yield from (part for part, _ in stretches_of(seen, length))
    if seen.scores_RS is not None:
        yield kept(seen.documents_RS, seen.scores_RS, length, seen.budget.best)


def stretches_of(seen: Seen, length: int) -> Iterator[tuple[Stretch, int]]:
    """Yield the part for each rule except `best`, with the maximum number of keys that a query sees in the part."""
    budget, documents_RS, places_RS, query_bins_RL, key_bins_RS, _ = seen
    documents_RL = documents_RS[:, -length:].contiguous()
    if budget.recent:
        yield stretch(documents_RL, documents_RL, documents_RS, budget.recent), budget.recent
    if budget.first:
        whole = stretch(documents_RL, documents_RL, documents_RS, documents_RS.shape[1])
        yield whole._replace(end_RL=torch.minimum(whole.end_RL, whole.first_RL + budget.first)), budget.first
    if budget.strided:
        at_stride_RS = (places_RS + 1) % budget.stride == 0
        yield (
            stretch(documents_RL, documents_RL, torch.where(at_stride_RS, documents_RS, -1), budget.strided),
            budget.strided,
        )
    if query_bins_RL is not None and key_bins_RS is not None:
        bins = torch.maximum(query_bins_RL.max(), key_bins_RS.max()) + 1
        key_class_RS = torch.where(documents_RS < 0, -1, documents_RS * bins + key_bins_RS)
        yield stretch(documents_RL * bins, documents_RL * bins + query_bins_RL, key_class_RS, budget.bin), budget.bin


def stretch(own_RL: Tensor, query_class_RL: Tensor, key_class_RS: Tensor, most: int) -> Stretch:
    """Build the part in which a query sees the last `most` keys in its class, up to its own token.

    `own_RL` is the smallest class in each query's document. No query sees a key with a negative class.
    """
    length = own_RL.shape[1]
    total = key_class_RS.shape[1]
    index_S = torch.arange(total, device=key_class_RS.device)
    sorted_RS, order_RS = (key_class_RS * total + index_S).sort(dim=1)
    begin_RL, first_RL = (torch.searchsorted(sorted_RS, class_RL * total) for class_RL in (own_RL, query_class_RL))
    end_RL = torch.searchsorted(sorted_RS, query_class_RL * total + index_S[-length:], right=True)
    return Stretch(order_RS, begin_RL, torch.maximum(first_RL, end_RL - most), end_RL)


def inverse(order_RS: Tensor) -> Tensor:
    """Return each key's rank: its position in the list of sorted keys `order_RS`."""
    index_S = torch.arange(order_RS.shape[1], device=order_RS.device)
    return torch.empty_like(order_RS).scatter_(1, order_RS, index_S.expand_as(order_RS))


def kept(documents_RS: Tensor, scores_RS: Tensor, length: int, most: int) -> Kept:
    """Build the part for the rule `best`: find the token at which each key leaves the best `most` keys.

    Of two keys in one document, the key with the larger score is better; if scores are equal, the earlier key is
    better. A key in a later document is better than any key in an earlier document. For a query, a key is among the
    best if fewer than `most` keys up to the query are better, and if the key's document has not ended.

    The loop handles a tile of TILE queries at a time. Only the best keys before a tile and the tile's own keys can be
    among the best for the tile's queries.
    """
    rows, total = scores_RS.shape
    index_S = torch.arange(total, device=scores_RS.device)
    until_RS = index_S.repeat(rows, 1)
    before_RC = best_of(documents_RS[:, : total - length], scores_RS[:, : total - length], most)
    until_RS.scatter_(1, before_RC, total - length)
    candidates: list[Tensor] = []
    for start in range(total - length, total, TILE):
        tile_Q = index_S[start : start + TILE]
        candidates_RW = torch.cat((before_RC, tile_Q.expand(rows, -1)), dim=1)
        ranks_RQW = _ranks(documents_RS.gather(1, candidates_RW), scores_RS.gather(1, candidates_RW), len(tile_Q))
        among_RQW = (ranks_RQW < most) & (tile_Q[:, None] >= candidates_RW[:, None])
        until_RS.scatter_add_(1, candidates_RW, among_RQW.sum(1))
        candidates.append(F.pad(candidates_RW, (0, most + TILE - candidates_RW.shape[1]), value=-1))
        last_RK = ranks_RQW[:, -1].argsort(dim=1)[:, :most]
        before_RC = candidates_RW.gather(1, last_RK).sort(dim=1).values
    end_RS = torch.searchsorted(documents_RS.contiguous(), documents_RS.contiguous(), right=True)
    return Kept(torch.minimum(until_RS, end_RS), torch.stack(candidates, dim=1), length)


def best_of(documents_RS: Tensor, scores_RS: Tensor, most: int) -> Tensor:
    """Return the indices of the last document's `most` best keys in ascending order.

    The shape is (R, `most`), or (R, S) if S is smaller. If the last document has fewer keys, keys from other documents
    fill the result.
    """
    scores_RS = scores_RS.masked_fill(documents_RS != documents_RS[:, -1:], -torch.inf)
    return scores_RS.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(dim=1).values


def _ranks(documents_RW: Tensor, scores_RW: Tensor, queries: int) -> Tensor:
    """Return for each query and key the number of better keys up to the query, (R, Q, W).

    The queries belong to the last `queries` keys.
    """
    earlier_W = torch.ones(*[scores_RW.shape[1]] * 2, dtype=torch.bool, device=scores_RW.device).triu(1)
    ahead = scores_RW[:, :, None]
    behind = scores_RW[:, None]
    better_RWW = (ahead > behind) | ((ahead == behind) & earlier_W)
    ahead = documents_RW[:, :, None]
    behind = documents_RW[:, None]
    better_RWW = (ahead > behind) | ((ahead == behind) & better_RWW)
    return better_RWW.cumsum(1)[:, -queries:]
