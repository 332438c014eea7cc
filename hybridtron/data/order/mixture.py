"""The source of each training row in a mixture, computed for any row without going through earlier rows.

A phase's rows are divided into blocks with K rows each. Let w_s be the weight for source s as a fraction of all
weights, and W_s = w_1 + ... + w_s. If n is a multiple of K, source s has round(W_s * n) - round(W_(s-1) * n) rows among
the first n rows. This number differs from w_s * n by less than one row. K is a multiple of the number of rows in a
step: the smallest multiple that is at least 2 / (the smallest w_s), so that every block has a row from every source.

Within a block, each source's rows are spread evenly. If a source has c rows in the block, its row j, counted from 0,
gets the key (j + 1/2) / c. The block's rows are sorted by their keys. Then each step's rows are shuffled.

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

from hybridtron.data.mixture_spec import MIN_SHARE
from hybridtron.data.order.stream import permutation

GRID_BITS = 60  # weights are rounded to multiples of 2**-60 times their sum; 2**-60 is far below MIN_SHARE


def cumulated(weights: Sequence[float]) -> list[int]:
    """Return the cumulative weights, scaled such that the first is 0 and the last is 2**60.

    Raises ValueError if a weight is not positive, or is below MIN_SHARE times the weights' sum.
    """
    if len(weights) == 0:
        raise ValueError("there are no weights; a mixture needs at least one source")
    for index, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            raise ValueError(f"weights[{index}] is {weight}, but a weight must be a positive number")
    exact = [Fraction(float(weight)) for weight in weights]
    total = sum(exact)
    for index, weight in enumerate(exact):
        if weight < MIN_SHARE * total:
            raise ValueError(
                f"weights[{index}] = {weights[index]} is {float(weight / total):.1e} of all weights; "
                f"leave the source out, or give it a weight of at least {MIN_SHARE:.0e} of all weights"
            )
    return [round(2**GRID_BITS * sum(exact[:index]) / total) for index in range(len(exact) + 1)]


class _Block(NamedTuple):
    """A block's rows.

    sources: each row's source, as an index
    ranks: for each row, how many earlier rows in the block have the same source
    """

    sources: np.ndarray
    ranks: np.ndarray


class Mixture:
    """Map from training rows to sources."""

    def __init__(self, weights: Sequence[float], rows_per_step: int, seed: int) -> None:
        self._boundaries = cumulated(weights)
        smallest = min(end - begin for begin, end in pairwise(self._boundaries))
        self._rows_per_step = rows_per_step
        # Each of the two roundings has an error of at most 1/2. So a source with weight w has at least w * K - 1
        # of K rows, which is at least 1 for K >= 2 / w.
        self._rows_per_block = -(-(2 << GRID_BITS) // (smallest * rows_per_step)) * rows_per_step
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._laid_out)

    def locate(self, row: int) -> tuple[int, int]:
        """Return a row's source as an index, and the row's number among this source's rows."""
        if len(self._boundaries) == 2:
            return 0, row
        block, offset = divmod(row, self._rows_per_block)
        sources, ranks = self._block(block)
        source = int(sources[offset])
        return source, self._count(source, block * self._rows_per_block) + int(ranks[offset])

    def _count(self, source: int, rows: int) -> int:
        """Count the rows from a source among the first `rows` rows; `rows` must be a multiple of a block's rows."""
        begin, end = self._boundaries[source : source + 2]
        rows = int(rows)  # the products below exceed numpy's 64 bits
        half = 1 << GRID_BITS - 1
        return (end * rows + half >> GRID_BITS) - (begin * rows + half >> GRID_BITS)

    def _laid_out(self, block: int) -> _Block:
        """Compute the sources for a block's rows."""
        first = block * self._rows_per_block
        counts = [
            self._count(source, first + self._rows_per_block) - self._count(source, first)
            for source in range(len(self._boundaries) - 1)
        ]
        by_source = np.repeat(np.arange(len(counts), dtype=np.uint8 if len(counts) <= 256 else np.uint16), counts)
        keys = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        # a random permutation of the rows within each step: a permutation of the block, stably sorted by step
        mixed = permutation(self._rows_per_block, self._seed, "mixture", block)
        mixed = mixed[np.argsort(mixed // self._rows_per_step, kind="stable")]
        sources = by_source[np.argsort(keys, kind="stable")][mixed]
        ranks = np.empty(self._rows_per_block, dtype=np.uint32)
        ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
        return _Block(sources, ranks)
