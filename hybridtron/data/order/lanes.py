"""Rows with `data.order=lanes`, for truncated backpropagation through time: each lane reads complete documents.

A lane is one row index in the batch. Each lane has its own endless stream, in which documents are complete. In step t a
lane reads the L + 1 tokens from position t * L in its stream: L inputs, and the label for the last input. The training
loop carries a recurrent state from a lane's row to its next row, and resets the state where a document starts. So the
state has seen all previous tokens in the current document, and no other tokens. No document is left out, and no row is
padded.

Documents are dealt to the lanes in rounds of about T tokens. Round m has three steps:

1. Take documents from each source. The source's documents form an endless stream, and w_s is the fraction of all tokens
   that source s contributes. The round takes the documents from the first document boundary at or after token
   w_s * m * T to the first document boundary at or after token w_s * (m + 1) * T. With one source, and T equal to the
   tokens in an epoch, a round is an epoch.
2. Interleave the documents from all sources evenly into one list.
3. Cut this list at document boundaries into one part for each lane, and append the parts to the lanes' streams in
   random order. Parts are sized such that the lanes' streams become equally long, as far as possible. If a lane's
   stream is already longer than this length, since it holds a very long document, the lane gets an empty part.

A lane's part depends on all previous rounds. To find a position in a lane's stream, a process therefore computes the
previous rounds once. This takes less than a microsecond per document, and 8 bytes of memory per lane and round. All
processes compute the same rows, because a row depends only on (seed, lane, step).
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
    """Contiguous documents.

    sources: each document's source, as an index
    numbers: each document's number within its source
    boundaries: token offsets at which the documents start, and at which the last document ends
    """

    sources: np.ndarray
    numbers: np.ndarray
    boundaries: np.ndarray


class Lanes:
    """Rows with `data.order=lanes`.

    weights: each source's weight, in the order of `streams`
    shuffle_tokens: tokens per round; if an epoch of all sources has fewer tokens, a round has that number of tokens
    joined: whether each lane counts as one document, so that token positions never restart
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
            raise ValueError(f"shuffle_tokens is {shuffle_tokens}; a round of documents needs at least 1 token")
        self._seed = seed
        self._joined = joined
        self._ends = [np.zeros(lanes, dtype=np.int64)]  # [m]: length of each lane's stream before round m
        # Full rounds are large, so only two are cached. Lanes may read parts of different rounds in the same step, so
        # the parts are cached separately, as copies.
        self._round = lru_cache(maxsize=2)(self._interleaved)
        self._dealt = lru_cache(maxsize=2)(self._cut)
        self._part = lru_cache(maxsize=2 * lanes)(self._copy_part)

    def row(self, lane: int, step: int) -> RowSpans:
        """Return the spans that a lane reads in a step."""
        position = step * self._seq_len
        count = self._seq_len + 1
        spans = []
        while count:
            number = self._round_at(lane, position)
            sources, documents, boundaries = self._part(lane, number)
            offset = position - int(self._ends[number][lane])
            num_taken = min(count, int(boundaries[-1]) - offset)
            new_spans = cut(documents, boundaries[1:], offset, num_taken)
            first = int(boundaries.searchsorted(offset, side="right")) - 1
            spans += zip(sources[first : first + len(new_spans)].tolist(), new_spans, strict=True)
            position = position + num_taken
            count = count - num_taken
        return RowSpans(spans, step * self._seq_len if self._joined else spans[0][1].first)

    def _round_at(self, lane: int, position: int) -> int:
        """Return the number of the round that contains a position in a lane's stream, after computing this round."""
        while self._ends[-1][lane] <= position:
            number = len(self._ends) - 1
            firsts, lasts = self._dealt(number)
            boundaries = self._round(number).boundaries
            self._ends.append(self._ends[-1] + boundaries[lasts] - boundaries[firsts])
        return bisect_right(self._ends, position, key=lambda ends: ends[lane]) - 1

    def _copy_part(self, lane: int, number: int) -> _Documents:
        """Return a lane's part of a round, as a copy, so that the full round can be freed."""
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
        targets = np.minimum(np.cumsum(lacking[order]), total)  # the level is rounded up, so the sum can exceed total
        # A part ends at the document boundary nearest to its target. The next round's level is computed from the
        # lanes' actual lengths, so these differences do not add up over rounds.
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
        middles = []
        for source, (stream, share) in enumerate(zip(self._streams, self._shares, strict=True)):
            begin, end = (stream.boundary(share * m * self._round_tokens >> GRID_BITS) for m in (number, number + 1))
            chosen, tokens = stream.documents(begin, end)
            sources.append(np.full(len(chosen), source, dtype=np.int32))
            numbers.append(chosen)
            lengths.append(tokens)
            # the middle of each document, as a fraction of the source's tokens in this round
            middles.append((2 * np.cumsum(tokens) - tokens) / max(1, 2 * (end - begin)))
        order = np.argsort(np.concatenate(middles), kind="stable")
        ends = np.cumsum(np.concatenate(lengths)[order])
        return _Documents(np.concatenate(sources)[order], np.concatenate(numbers)[order], np.append(0, ends))


def _level(filled: np.ndarray, volume: int) -> int:
    """Return the length to which the shortest lanes can be filled with `volume` tokens (water filling).

    filled: current length of each lane's stream
    """
    # If the tokens fill exactly the k shortest lanes, the level h satisfies: sum over these lanes of (h - filled_i) =
    # volume, so h = (volume + sum of filled_i) / k. Lane k, in ascending order of length, is filled too if raising all
    # shorter lanes to its length needs at most `volume` tokens. The level is rounded up to a whole token.
    filled = np.sort(filled)
    before = np.cumsum(filled) - filled
    room = filled * np.arange(len(filled)) - before  # [k]: tokens that raise all shorter lanes to the length of lane k
    reached = int(room.searchsorted(volume, side="right"))
    return -(-(volume + int(before[reached - 1] + filled[reached - 1])) // reached)
