"""Searches for the largest number of units (lines, words, ...) with which a text fits a length in tokens.

A task makes a longer text by adding units. A unit is at least one token, so a text has at most as many units as tokens.
`most_units` searches with one sample. Other samples with this number of units may be longer, so `shrink` checks each
sample's length and removes units until the sample fits.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtron.tasks.base import TaskError


class TooShort(TaskError):
    """Raised if a sample with the minimum number of units does not fit the length."""


def most_units(size: Callable[[int], int], length: int, fewest: int, step: int) -> int:
    """Return the largest number of units, fewest + n * step, with which a sample has at most `length` tokens.

    size: function that returns a sample's length in tokens for a number of units; if a sample with this number can't
        be made, the function must return a value greater than `length`

    n is doubled until the sample is too long, and then found by bisection. If even `fewest` units are too long, the
    function returns `fewest`.
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
        else:
            too_many = middle
    return fewest + fits * step


def shrink(size: Callable[[int], int], length: int, units: int, fewest: int, step: int, what: str) -> int:
    """Reduce `units` repeatedly by `step` until the sample has at most `length` tokens, and return the result.

    size: function that returns the sample's length in tokens for a number of units
    what: the task's name, for the message

    The result is at least `fewest`. Raises TooShort if `fewest` units do not fit.
    """
    while (needed := size(units)) > length:
        if units <= fewest:
            raise TooShort(
                f"{what}: a length of {length} can't fit a sample, which needs {needed} tokens at least",
                code="does-not-fit",
            )
        units = max(fewest, units - step)
    return units
