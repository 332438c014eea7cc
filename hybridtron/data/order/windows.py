"""Rows in `order=windows`: shuffled windows from packed documents, for a mixture of sources.

Window w in a source's stream is the L + 1 tokens from position w L. Its last token is only a label, and is the first
input in the next window. So each token is an input exactly once per epoch, and no tail is dropped. The windows that
begin in an epoch are divided into groups with about `shuffle_tokens` inputs, and each group is shuffled.

A row's window is computed directly, without going through earlier rows. With T tokens in an epoch, the windows that
begin in epoch e are those from ceil(e T / L) on, so row r lies in epoch floor(r L / T). If n windows begin in an epoch,
it has g = round(n L / shuffle_tokens) groups. Group k begins at window floor(k n / g), so the group that holds the
epoch's window i is the largest k with floor(k n / g) <= i, which is floor(((i + 1) g - 1) / n).

Letters: L input tokens in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hybridtron.config.growth import Growth
from hybridtron.data.order.mixture import Mixture
from hybridtron.data.order.stream import DocumentStream, RowSpans, Span, permutation


class ShuffledWindows:
    """Row r in a source -> a window with L + 1 tokens, shuffled within its group; in file order without a seed."""

    def __init__(self, stream: DocumentStream, seq_len: int, shuffle_tokens: int, seed: int | None) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._windows_per_group = max(1, shuffle_tokens // seq_len)
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def spans(self, row: int) -> list[Span]:
        """Return the spans that hold a row's L + 1 tokens."""
        return self._stream.spans(self.window(row) * self._seq_len, self._seq_len + 1)

    def window(self, row: int) -> int:
        """Return the stream's window that a row reads, by number."""
        if self._seed is None:
            return row
        epoch = row * self._seq_len // self._stream.tokens_per_epoch
        first = self._first(epoch)
        windows = self._first(epoch + 1) - first
        groups = self._groups(windows)
        group = ((row - first + 1) * groups - 1) // windows  # the last group that begins at this row or before
        begin = first + group * windows // groups
        return begin + int(self._order(epoch, group)[row - begin])

    def _first(self, epoch: int) -> int:
        """Return the first window that begins in an epoch."""
        return -(-epoch * self._stream.tokens_per_epoch // self._seq_len)

    def _groups(self, windows: int) -> int:
        """Return how many nearly equal groups an epoch's windows form."""
        return max(1, (windows + self._windows_per_group // 2) // self._windows_per_group)

    def _shuffled(self, epoch: int, group: int) -> np.ndarray:
        """Return a group's windows in random order, numbered from the group's start."""
        windows = self._first(epoch + 1) - self._first(epoch)
        groups = self._groups(windows)
        count = (group + 1) * windows // groups - group * windows // groups
        assert self._seed is not None
        return permutation(count, self._seed, "windows", epoch, group)


class MixedWindows:
    """Rows in `order=windows`: lane i in step s reads the mixture's row n + i, after n rows in earlier steps.

    Each row is a window from one source. A growing batch changes n, but not the sequence of rows.
    """

    def __init__(self, windows: Sequence[ShuffledWindows], mixture: Mixture, growth: Growth) -> None:
        self._windows = windows
        self._mixture = mixture
        self._growth = growth

    def row(self, lane: int, step: int) -> RowSpans:
        """Return the spans that a lane reads in a step."""
        source, number = self._mixture.place(self._growth.rows_before(step) + lane)
        return RowSpans([(source, span) for span in self._windows[source].spans(number)], position=0)
