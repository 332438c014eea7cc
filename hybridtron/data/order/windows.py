"""Rows of `order=windows`: shuffled windows of packed documents, from a mixture of sources.

Window w of a source's stream is the L + 1 tokens from position w L on: its last token is only a label, and the first
input of the next window. So each token is an input exactly once an epoch, and no tail is dropped. The windows that
begin in an epoch are cut into groups of about `shuffle_tokens` inputs, each shuffled among themselves.

Everything is found without a walk. With T tokens in an epoch, the windows that begin in epoch e are those from
ceil(e T / L) on, so row r lies in epoch floor(r L / T). An epoch of n windows has g = round(n L / shuffle_tokens)
groups; group k begins at window floor(k n / g), so the group of the epoch's window i is the largest k with
floor(k n / g) <= i, which is floor(((i + 1) g - 1) / n).

Letters: L input tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hybridtron.config.growth import Growth
from hybridtron.data.order.mixture import Mixture
from hybridtron.data.order.stream import DocumentStream, RowSpans, Span, permutation


class ShuffledWindows:
    """Row r of a source: a window of L + 1 tokens, shuffled within its group; without a seed as its files are."""

    def __init__(self, stream: DocumentStream, seq_len: int, shuffle_tokens: int, seed: int | None) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._windows_per_group = max(1, shuffle_tokens // seq_len)
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def spans(self, row: int) -> list[Span]:
        """Where the L + 1 tokens of a row are found."""
        return self._stream.spans(self.window(row) * self._seq_len, self._seq_len + 1)

    def window(self, row: int) -> int:
        """Which window of the stream a row is."""
        if self._seed is None:
            return row
        epoch = row * self._seq_len // self._stream.tokens_per_epoch
        first = self._first(epoch)
        windows = self._first(epoch + 1) - first
        groups = self._groups(windows)
        group = ((row - first + 1) * groups - 1) // windows  # the last one that begins at this row or before
        begin = first + group * windows // groups
        return begin + int(self._order(epoch, group)[row - begin])

    def _first(self, epoch: int) -> int:
        """The first window that begins in an epoch."""
        return -(-epoch * self._stream.tokens_per_epoch // self._seq_len)

    def _groups(self, windows: int) -> int:
        """Into how many groups of nearly equal size the windows of an epoch are cut."""
        return max(1, (windows + self._windows_per_group // 2) // self._windows_per_group)

    def _shuffled(self, epoch: int, group: int) -> np.ndarray:
        windows = self._first(epoch + 1) - self._first(epoch)
        groups = self._groups(windows)
        count = (group + 1) * windows // groups - group * windows // groups
        assert self._seed is not None
        return permutation(count, self._seed, "windows", epoch, group)


class MixedWindows:
    """Row i of step s is row n + i of the mixture, n being the rows of all steps before: a window of one source.

    With a batch that grows, n follows from its growth; the rows themselves are the same as without.
    """

    def __init__(self, windows: Sequence[ShuffledWindows], mixture: Mixture, growth: Growth) -> None:
        self._windows, self._mixture, self._growth = windows, mixture, growth

    def row(self, lane: int, step: int) -> RowSpans:
        source, number = self._mixture.place(self._growth.rows_before(step) + lane)
        return RowSpans([(source, span) for span in self._windows[source].spans(number)], position=0)
