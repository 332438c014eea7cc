"""Rows with `data.order=windows`: shuffled windows from packed documents, for a mixture of sources.

A source's documents form an endless token stream, epoch after epoch. Let L be `seq_len`, the tokens per row. Window w
is the L + 1 tokens from position w * L in this stream: L inputs, and the label for the last input. The label is also
the first input in window w + 1. So every token is an input exactly once per epoch.

A source's row reads one window. The windows that begin in an epoch are divided into groups of consecutive windows, with
about `shuffle_tokens` inputs per group. The rows of a group read the group's windows in random order: if windows 10 to
19 are a group, rows 10 to 19 read these ten windows, each once.

A row's group is computed directly, without going through earlier rows. Let an epoch have T tokens. The first window
that begins in epoch e is window ceil(e * T / L), and window r begins in epoch floor(r * L / T). If n windows begin in
an epoch, the epoch has about n * L / shuffle_tokens groups. Let g be the number of groups. Group k begins with the
epoch's window floor(k * n / g). So the epoch's window i is in the group with the largest k such that
floor(k * n / g) <= i. This condition is the same as k * n < (i + 1) * g, so k = floor(((i + 1) * g - 1) / n).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from hybridtron.config.batch_ramp import BatchRamp
from hybridtron.data.order.mixture import Mixture
from hybridtron.data.order.stream import DocumentStream, RowSpans, Span, permutation


class ShuffledWindows:
    """One source's rows; each row reads one window from the source's stream.

    seq_len: input tokens per row
    shuffle_tokens: approximate number of input tokens in a group, whose windows are shuffled together
    seed: the seed of the shuffles; None to read the windows in order
    """

    def __init__(self, stream: DocumentStream, seq_len: int, shuffle_tokens: int, seed: int | None) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._windows_per_group = max(1, shuffle_tokens // seq_len)
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def spans(self, row: int) -> list[Span]:
        """Return the document spans that contain a row's L + 1 tokens."""
        return self._stream.spans(self.window(row) * self._seq_len, self._seq_len + 1)

    def window(self, row: int) -> int:
        """Return the number of the window that a row reads."""
        if self._seed is None:
            return row
        epoch = row * self._seq_len // self._stream.tokens_per_epoch
        first = self._first(epoch)
        windows = self._first(epoch + 1) - first
        groups = self._groups(windows)
        group = ((row - first + 1) * groups - 1) // windows  # the last group that begins at or before window `row`
        begin = first + group * windows // groups
        return begin + int(self._order(epoch, group)[row - begin])

    def _first(self, epoch: int) -> int:
        """Return the number of the first window that begins in an epoch."""
        return -(-epoch * self._stream.tokens_per_epoch // self._seq_len)

    def _groups(self, windows: int) -> int:
        """Return the number of groups into which an epoch's windows are divided."""
        return max(1, (windows + self._windows_per_group // 2) // self._windows_per_group)

    def _shuffled(self, epoch: int, group: int) -> np.ndarray:
        """Return a group's windows in random order, where the group's first window has number 0."""
        windows = self._first(epoch + 1) - self._first(epoch)
        groups = self._groups(windows)
        count = (group + 1) * windows // groups - group * windows // groups
        assert self._seed is not None
        return permutation(count, self._seed, "windows", epoch, group)


class MixedWindows:
    """A mixture's rows; each row reads one window from one source.

    A lane is a row index in the batch. If all previous steps together have n rows, lane i of a step reads the mixture's
    row n + i.
    """

    def __init__(self, windows: Sequence[ShuffledWindows], mixture: Mixture, batch_ramp: BatchRamp) -> None:
        self._windows = windows
        self._mixture = mixture
        self._batch_ramp = batch_ramp

    def row(self, lane: int, step: int) -> RowSpans:
        """Return the document spans that a lane reads in a step."""
        source, number = self._mixture.locate(self._batch_ramp.rows_before(step) + lane)
        return RowSpans([(source, span) for span in self._windows[source].spans(number)], position=0)
