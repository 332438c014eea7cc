"""How much of a haystack fits a length: the largest number of units, found by a search that ends.

A unit is at least one token, so no more units than tokens can fit; a sample that is too long with the fewest units is
an error. Tokens needn't grow evenly with units, so a found number is checked by its own sample.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtron.tasks.base import TaskError


class TooShort(TaskError):
    """A length that can't fit a sample."""


def most_units(size: Callable[[int], int], length: int, fewest: int, step: int) -> int:
    """The largest fewest + n * step units whose sample has at most `length` tokens; `fewest` even where it has more.

    Doubles the steps until a sample is too long, then halves the interval. Units that `size` can't make are its
    business: it may return any number above `length`.
    """
    fits, too_many = 0, 1
    while fewest + too_many * step <= length and size(fewest + too_many * step) <= length:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        units = fewest + middle * step
        fits, too_many = (middle, too_many) if units <= length and size(units) <= length else (fits, middle)
    return fewest + fits * step


def shrink(size: Callable[[int], int], length: int, units: int, fewest: int, step: int, what: str) -> int:
    """The largest units - n * step that fit; TooShort where `fewest` don't."""
    while (needed := size(units)) > length:
        if units <= fewest:
            raise TooShort(f"{what}: a length of {length} can't fit a sample, which needs {needed} tokens at least")
        units = max(fewest, units - step)
    return units
