"""The rules of sparse attention as two kinds of parts, whose cost is linear in the tokens.

Stretch  the keys are sorted by a class (a document, or a bin in it), and within a class as in the text. A query sees
         a range of this order: the last keys of its class up to itself, or the first ones. Every rule except `best` is
         a stretch.
Kept     a key is seen by every query from its own token on, until it is no longer among the best. A key that has left
         the best never returns, since the number of better keys only grows. So one number per key is enough.

A part can test any pair of a query and a key. It also has tiles: a few queries, with all the keys that they see.

Legend as in `reference`; T tiles, Q queries and W keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.sparse.reference import Seen

TILE = 64
"""Queries in a tile. It is also the length of a band of keys: queries whose stretches end in one band share tiles."""


class Tiles(NamedTuple):
    """Indices of each tile's queries and keys among those of all rows; -1 marks an empty slot."""

    queries_TQ: Tensor
    keys_TW: Tensor


class PatternPart(Protocol):
    """Pairs of a query and a key that it sees."""

    def sees(self, tiles: Tiles) -> Tensor:
        """Return a mask for each tile, True where this part lets a query see a key, (T, Q, W)."""
        ...

    def tiles(self) -> Tiles:
        """Return tiles that contain every pair of this part exactly once."""
        ...


class Stretch(NamedTuple):
    """Sorted keys: query l sees those from rank first_RL to end_RL - 1. Its document begins at rank begin_RL."""

    order_RS: Tensor
    begin_RL: Tensor
    first_RL: Tensor
    end_RL: Tensor

    def sees(self, tiles: Tiles) -> Tensor:
        rank_TW = inverse(self.order_RS).flatten()[tiles.keys_TW]
        first_TQ, end_TQ = (x_RL.flatten()[tiles.queries_TQ] for x_RL in (self.first_RL, self.end_RL))
        return (first_TQ[..., None] <= rank_TW[:, None]) & (rank_TW[:, None] < end_TQ[..., None])

    def tiles(self) -> Tiles:
        """Return tiles; queries share tiles if their stretches end within the same band of TILE keys.

        Bands are counted from a document's beginning, so its tiles do not depend on its position in the row.
        """
        (rows, total) = self.order_RS.shape
        device = self.order_RS.device
        row_R1 = torch.arange(rows, device=device)[:, None]
        band_RL = row_R1 * total + self.begin_RL + (self.end_RL - 1 - self.begin_RL) // TILE * TILE
        asking = (self.first_RL < self.end_RL).flatten().nonzero().squeeze(1)
        by_band, sorted_ = band_RL.flatten()[asking].sort(stable=True)
        bands_N, count_N = by_band.unique_consecutive(return_counts=True)
        tiles_N = -(-count_N // TILE)
        place = torch.arange(len(asking), device=device) - (count_N.cumsum(0) - count_N).repeat_interleave(count_N)
        tile = (tiles_N.cumsum(0) - tiles_N).repeat_interleave(count_N) + place // TILE
        band_T = bands_N.repeat_interleave(tiles_N)
        queries_TQ = torch.full((len(band_T), TILE), -1, device=device)
        queries_TQ[tile, place % TILE] = asking[sorted_]
        most = int((self.end_RL - self.first_RL).max())
        ranks_TW = (band_T % total)[:, None] + torch.arange(1 - most, TILE, device=device)
        row_T1 = (band_T // total)[:, None]
        keys_TW = self.order_RS[row_T1, ranks_TW.clamp(0, total - 1)] + row_T1 * total
        return Tiles(queries_TQ, keys_TW.where((ranks_TW >= 0) & (ranks_TW < total), -1))


class Kept(NamedTuple):
    """Keys that every query sees from their own token up to, but not including, token until_RS, an index among keys.

    candidates_RTW: the keys that some query of each tile may see; -1 marks an empty slot.
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
    """Yield one part for each rule in the budget; two parts may contain the same pair."""
    yield from (part for part, _ in stretches_of(seen, length))
    if seen.scores_RS is not None:
        yield kept(seen.documents_RS, seen.scores_RS, length, seen.budget.best)


def stretches_of(seen: Seen, length: int) -> Iterator[tuple[Stretch, int]]:
    """Yield the stretch for each rule but `best`, with the maximum number of keys that a query sees in it."""
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
    """Build the stretch with the last `most` keys of each query's class, up to its own token.

    `own_RL` is the smallest class in a query's document.
    """
    length = own_RL.shape[1]
    total = key_class_RS.shape[1]
    index_S = torch.arange(total, device=key_class_RS.device)
    sorted_RS, order_RS = (key_class_RS * total + index_S).sort(dim=1)
    begin_RL, first_RL = (torch.searchsorted(sorted_RS, class_RL * total) for class_RL in (own_RL, query_class_RL))
    end_RL = torch.searchsorted(sorted_RS, query_class_RL * total + index_S[-length:], right=True)
    return Stretch(order_RS, begin_RL, torch.maximum(first_RL, end_RL - most), end_RL)


def inverse(order_RS: Tensor) -> Tensor:
    """Return the rank of each key in an order."""
    index_S = torch.arange(order_RS.shape[1], device=order_RS.device)
    return torch.empty_like(order_RS).scatter_(1, order_RS, index_S.expand_as(order_RS))


def kept(documents_RS: Tensor, scores_RS: Tensor, length: int, most: int) -> Kept:
    """Find until which token each key is among the best, TILE queries at a time.

    Only the best keys before a tile and the tile's own keys can be among the best for its queries. A key's rank at a
    query is the number of better keys up to the query. A key is better if its document is later, or in the same
    document if its score is larger, or equal and the key earlier. A key is among the best while its rank is less than
    `most`, until its document ends.
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
    """Return the indices of the last document's best keys, rising, (R, at most `most`).

    If it has fewer keys, keys of other documents complete the number.
    """
    scores_RS = scores_RS.masked_fill(documents_RS != documents_RS[:, -1:], -torch.inf)
    return scores_RS.sort(dim=1, descending=True, stable=True).indices[:, :most].sort(dim=1).values


def _ranks(documents_RW: Tensor, scores_RW: Tensor, queries: int) -> Tensor:
    """Count the keys that are better than each, up to each of the last `queries` keys, (R, Q, W)."""
    earlier_W = torch.ones(*[scores_RW.shape[1]] * 2, dtype=torch.bool, device=scores_RW.device).triu(1)
    ahead = scores_RW[:, :, None]
    behind = scores_RW[:, None]
    better_RWW = (ahead > behind) | ((ahead == behind) & earlier_W)
    ahead = documents_RW[:, :, None]
    behind = documents_RW[:, None]
    better_RWW = (ahead > behind) | ((ahead == behind) & better_RWW)
    return better_RWW.cumsum(1)[:, -queries:]
