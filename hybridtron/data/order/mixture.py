"""The source of each training row: exact by weight, and computed without going through earlier rows.

With cumulative weights W_s (W_last = 1), source s has round(W_s n) - round(W_(s-1) n) of the first n rows, which is
less than one row from w_s n. This holds at block boundaries, where a block has K rows. K is the smallest multiple of a
step's rows that is at least 2 / (the smallest weight), so that no source's count can fall from boundary to boundary.
Within a block each source's rows are spread evenly, the j-th of n at (j + 1/2) / n. Then each step's rows are shuffled
among its lanes.

Weights are rounded to multiples of 2**-60 times their sum, so that all counts are exact integers on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hybridtron.data.mixture_spec import SMALLEST_SHARE
from hybridtron.data.order.stream import permutation

GRID_BITS = 60


def cumulated(weights: Sequence[float]) -> list[int]:
    """Return the boundaries 0 .. 2**60 that divide 2**60 among the sources by weight.

    Raises ValueError if a weight is not positive, or its share is below SMALLEST_SHARE.
    """
    if len(weights) == 0:
        raise ValueError("no weights: a mixture needs at least one source")
    for index, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise ValueError(f"weights[{index}] = {weight}: a weight must be a positive number")
    exact = [Fraction(float(weight)) for weight in weights]
    total = sum(exact)
    for index, weight in enumerate(exact):
        if weight < SMALLEST_SHARE * total:
            raise ValueError(
                f"weights[{index}] = {weights[index]} is {float(weight / total):.1e} of all weights; "
                f"leave the source out, or give it at least {SMALLEST_SHARE:.0e}"
            )
    return [round(2**GRID_BITS * sum(exact[:index]) / total) for index in range(len(exact) + 1)]


class _Block(NamedTuple):
    """A block's rows: each row's source, and the number of earlier rows in the block with this source."""

    sources: np.ndarray
    ranks: np.ndarray


class Mixture:
    """Assignment of training rows to sources: row -> (source, number among the source's rows)."""

    def __init__(self, weights: Sequence[float], rows_per_step: int, seed: int) -> None:
        self._boundaries = cumulated(weights)
        smallest = min(end - begin for begin, end in pairwise(self._boundaries))
        self._rows_per_step = rows_per_step
        # In K rows a source of weight w has at least w K - 1 rows, as two roundings are off by less than 1/2 each. With
        # K >= 2 / w that is 1 or more: every block has rows of every source.
        self._rows_per_block = -(-(2 << GRID_BITS) // (smallest * rows_per_step)) * rows_per_step
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._laid_out)

    def place(self, row: int) -> tuple[int, int]:
        """Return a row's source, and the row's number among the source's rows."""
        if len(self._boundaries) == 2:
            return 0, row
        block, offset = divmod(row, self._rows_per_block)
        sources, ranks = self._block(block)
        source = int(sources[offset])
        return source, self._count(source, block * self._rows_per_block) + int(ranks[offset])

    def _count(self, source: int, rows: int) -> int:
        """Return how many rows before `rows`, a block boundary, belong to a source."""
        begin, end = self._boundaries[source : source + 2]
        # int, because numpy's integers would overflow here
        rows = int(rows)
        half = 1 << GRID_BITS - 1
        return (end * rows + half >> GRID_BITS) - (begin * rows + half >> GRID_BITS)

    def _laid_out(self, block: int) -> _Block:
        """Lay out a block's rows."""
        first = block * self._rows_per_block
        counts = [
            self._count(source, first + self._rows_per_block) - self._count(source, first)
            for source in range(len(self._boundaries) - 1)
        ]
        by_source = np.repeat(np.arange(len(counts), dtype=np.uint8 if len(counts) <= 256 else np.uint16), counts)
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        # A permutation of the block's rows, sorted stably by step, permutes the rows of each step.
        mixed = permutation(self._rows_per_block, self._seed, "mixture", block)
        mixed = mixed[np.argsort(mixed // self._rows_per_step, kind="stable")]
        sources = by_source[np.argsort(places, kind="stable")][mixed]
        ranks = np.empty(self._rows_per_block, dtype=np.uint32)
        ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
        return _Block(sources, ranks)
