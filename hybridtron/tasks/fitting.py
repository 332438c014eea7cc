"""Searches for the largest number of units (lines, words, ...) with which a text fits a length in tokens.

A unit is at least one token, so the length bounds the search. A sample that is too long with the fewest units is an
error. Tokens need not grow monotonically with units, so `shrink` checks each sample by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtron.tasks.base import TaskError


class TooShort(TaskError):
    """Raised if a sample is too long even with the fewest units."""


def most_units(size: Callable[[int], int], length: int, fewest: int, step: int) -> int:
    """Return the largest fewest + n * step units with at most `length` tokens, or `fewest` if even that is too long.

    n is doubled until a sample is too long, then bisected. `size(units)` returns the sample's length in tokens; if it
    can't generate a sample with that number of units, it may return any number above `length`.
    """
    fits = 0
    too_many = 1
    while fewest + too_many * step <= length and size(fewest + too_many * step) <= length:
        fits = too_many
        too_many = 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        units = fewest + middle * step
        if units <= length and size(units) <= length:
            fits = middle
            too_many = too_many
        else:
            fits = fits
            too_many = middle
    return fewest + fits * step


def shrink(size: Callable[[int], int], length: int, units: int, fewest: int, step: int, what: str) -> int:
    """Return the largest units - n * step that fit, at least `fewest`. Raises TooShort if `fewest` don't fit.

    `what` names the task in the message.
    """
    while (needed := size(units)) > length:
        if units <= fewest:
            raise TooShort(
                f"{what}: a length of {length} can't fit a sample, which needs {needed} tokens at least",
                code="does-not-fit",
            )
        units = max(fewest, units - step)
    return units
