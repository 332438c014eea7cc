"""Lanes for truncated backpropagation: each row position in the batch reads complete documents, chunk after chunk.

Lane i has its own endless stream of complete documents, and its step t reads the L + 1 tokens from position t L. So a
state that is carried from row to row, and reset where a document starts, has seen exactly its document. Documents are
neither cut between lanes nor left out, and there is no padding: instead the lanes drift apart.

Documents are dealt in rounds with about T tokens each. From source s, with share w_s, round m takes the documents
between two boundaries in its stream: the first at or after w_s m T, and the first at or after w_s (m + 1) T. With one
source, and T equal to its tokens per epoch, a round is an epoch. All sources' documents are interleaved evenly. This
list is then cut at document boundaries into one part per lane, with the lanes in random order. A part's length is the
amount that its lane lacks to a common level, to which the round would fill all lanes. So a lane with a giant document
gets nothing until the others have caught up, and with fewer documents than lanes no lane stays empty.

A lane's part depends on the rounds before. Finding a far position therefore goes through all of them once, which takes
a fraction of a microsecond per document, and 8 bytes per lane and round. Rows are still functions of (seed, lane,
step): every process computes the same rows.

Letters: L input tokens in a row, T tokens in a round, w a source's share, m round number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hybridtron.data.order.mixture import GRID_BITS, cumulated
from hybridtron.data.order.stream import DocumentStream, RowSpans, cut, permutation


class _Documents(NamedTuple):
    """Documents end to end: each one's source, its number there, and all boundaries (one more than documents)."""

    sources: np.ndarray
    numbers: np.ndarray
    boundaries: np.ndarray


class Lanes:
    """Rows in `order=lanes`: lane i, step t -> L + 1 tokens from position t L in the lane's own document stream.

    Finding a far position computes all rounds before it, once per process. With `joined`, a lane counts as one
    document, whose positions never restart.
    """

    def __init__(
        self,
        streams: Sequence[DocumentStream],
        weights: Sequence[float],
        lanes: int,
        seq_len: int,
        shuffle_tokens: int,
        seed: int,
        joined: bool = False,
    ) -> None:
        if len(streams) != len(weights):
            raise ValueError(f"{len(streams)} streams but {len(weights)} weights")
        shares = cumulated(weights)
        self._streams = streams
        self._shares = [end - begin for begin, end in pairwise(shares)]
        self._lanes = lanes
        self._seq_len = seq_len
        self._round_tokens = int(min(shuffle_tokens, sum(stream.tokens_per_epoch for stream in streams)))
        if self._round_tokens < 1:
            raise ValueError(f"shuffle_tokens={shuffle_tokens}: a round of documents needs at least 1")
        self._seed = seed
        self._joined = joined
        self._ends = [np.zeros(lanes, dtype=np.int64)]  # [m]: the end of each lane before round m
        self._round = lru_cache(maxsize=2)(self._interleaved)
        self._dealt = lru_cache(maxsize=2)(self._cut)
        self._piece = lru_cache(maxsize=2 * lanes)(self._taken)  # by lane: a lane may be many rounds behind

    def row(self, lane: int, step: int) -> RowSpans:
        """Return the spans that a lane reads in a step."""
        position = step * self._seq_len
        count = self._seq_len + 1
        spans = []
        while count:
            number = self._round_at(lane, position)
            sources, documents, boundaries = self._piece(lane, number)
            offset = position - int(self._ends[number][lane])
            num_taken = min(count, int(boundaries[-1]) - offset)
            new_spans = cut(documents, boundaries[1:], offset, num_taken)
            first = int(boundaries.searchsorted(offset, side="right")) - 1
            spans += zip(sources[first : first + len(new_spans)].tolist(), new_spans, strict=True)
            position = position + num_taken
            count = count - num_taken
        return RowSpans(spans, step * self._seq_len if self._joined else spans[0][1].first)

    def _round_at(self, lane: int, position: int) -> int:
        """Return the round that contains a position in a lane's stream. Computes the rounds up to it."""
        while self._ends[-1][lane] <= position:
            number = len(self._ends) - 1
            firsts, lasts = self._dealt(number)
            boundaries = self._round(number).boundaries
            self._ends.append(self._ends[-1] + boundaries[lasts] - boundaries[firsts])
        return bisect_right(self._ends, position, key=lambda ends: ends[lane]) - 1

    def _taken(self, lane: int, number: int) -> _Documents:
        """Copy a lane's part from a round, so that the full round can be freed."""
        firsts, lasts = self._dealt(number)
        first = int(firsts[lane])
        last = int(lasts[lane])
        sources, documents, boundaries = self._round(number)
        return _Documents(
            sources[first:last].copy(), documents[first:last].copy(), boundaries[first : last + 1] - boundaries[first]
        )

    def _cut(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide a round among the lanes; return the indexes of each lane's first and last boundary."""
        boundaries = self._round(number).boundaries
        total = int(boundaries[-1])
        order = permutation(self._lanes, self._seed, "lanes", number)
        lacking = np.maximum(0, _level(self._ends[number], total) - self._ends[number])
        targets = np.minimum(np.cumsum(lacking[order]), total)  # the level is rounded up
        # A part ends at the document boundary nearest to its target. The error stays in the lane's end, from which the
        # next round's level is computed, so errors do not add up.
        after = boundaries.searchsorted(targets)
        before = np.maximum(after - 1, 0)
        cuts = np.where(targets - boundaries[before] < boundaries[after] - targets, before, after)
        lasts = np.empty_like(cuts)
        lasts[order] = cuts
        firsts = np.empty_like(cuts)
        firsts[order] = np.concatenate([[0], cuts[:-1]])
        return firsts, lasts

    def _interleaved(self, number: int) -> _Documents:
        """Return a round's documents from all sources, interleaved evenly."""
        sources = []
        numbers = []
        lengths = []
        places = []
        for source, (stream, share) in enumerate(zip(self._streams, self._shares, strict=True)):
            begin, end = (stream.boundary(share * m * self._round_tokens >> GRID_BITS) for m in (number, number + 1))
            chosen, tokens = stream.documents(begin, end)
            sources.append(np.full(len(chosen), source, dtype=np.int32))
            numbers.append(chosen)
            lengths.append(tokens)
            places.append((2 * np.cumsum(tokens) - tokens) / max(1, 2 * (end - begin)))  # of the middle
        order = np.argsort(np.concatenate(places), kind="stable")
        ends = np.cumsum(np.concatenate(lengths)[order])
        return _Documents(np.concatenate(sources)[order], np.concatenate(numbers)[order], np.append(0, ends))


def _level(filled: np.ndarray, volume: int) -> int:
    """Return the water-filling level: the lowest level at which `volume` fits above the heights `filled`."""
    # Picture vessels of width 1 that are filled to these heights. Water over the k lowest vessels rises to the level h
    # at which the sum of (h - filled_i) over them is the volume: h = (volume + their sum) / k. It reaches vessel k
    # where the room below that vessel's top, over the lower ones, is at most the volume. The level is rounded up to
    # whole tokens.
    filled = np.sort(filled)
    before = np.cumsum(filled) - filled
    room = filled * np.arange(len(filled)) - before  # below the top of vessel k, over the lower ones
    reached = int(room.searchsorted(volume, side="right"))
    return -(-(volume + int(before[reached - 1] + filled[reached - 1])) // reached)
